"""One cell: its process, its mode, hand-over of live calls, joining a batch."""
