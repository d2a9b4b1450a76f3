"""The commands; each module is imported only when its command is called."""
