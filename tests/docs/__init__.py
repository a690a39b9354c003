"""What the README and the pages show keeps what they say."""
