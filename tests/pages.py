"""A page of HTML as a test reads it."""

from html.parser import HTMLParser

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Elements in order with their attributes, and the text; open and closed tags must match."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.text = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def references(self):
        names = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "background"}
        return [value for _, attrs in self.elements for n, value in attrs.items() if n in names]
