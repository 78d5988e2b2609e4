"""Where the model lives. A placement is a Runner with its settings."""
