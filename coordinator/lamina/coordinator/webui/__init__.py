"""The web page's files: plain HTML, ES modules and CSS, served as they lie here. `api.pages` serves them."""
