"""Task formats, the control gate, and the generated task family minirepo."""
