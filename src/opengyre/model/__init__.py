"""The embedded policy: tokenizer, chat format, decoder, weight files, warm start."""
