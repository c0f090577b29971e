"""Messages to tokens and back, by chat family."""
