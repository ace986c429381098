"""What surrounds a built callable: step down, verify, watch the first call, TF32, memory, time, fallback limit."""
