"""One way to hold bytes that other processes read: where they lie, and how readers check them."""
