"""One request from its checked job to its last token, whichever workers it takes."""
