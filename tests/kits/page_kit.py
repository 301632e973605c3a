"""What the tests of the reports share: a reader of their pages."""

from __future__ import annotations

import html.parser


class Page(html.parser.HTMLParser):
    """Reads a page: its tags, attributes and words; and whether every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open, self.said, self.crossed = [], [], [], [], []
        self.feed(text)
        self.close()

    @property
    def words(self):
        return "".join(self.said)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in {"meta", "img", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.crossed.append(tag)

    def handle_data(self, data):
        if "script" not in self.open[-1:]:
            self.said.append(data)
