"""What Python reads from the kernel: /proc, /sys, limits. Nothing here changes anything; that is the runtime's part."""
