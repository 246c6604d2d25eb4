"""One module a dialect: parse a request, shape an answer, a stream and an error."""
