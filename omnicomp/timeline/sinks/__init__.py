"""Where events go besides memory: JSON Lines files, loggers, torch's structured trace, OpenTelemetry."""
