"""One request from its checked specs to its last token, whichever workers it takes."""
