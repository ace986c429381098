"""What keeps omnicomp harmless to programs and machines beside it: no secret in a text, no markup that is obeyed."""
