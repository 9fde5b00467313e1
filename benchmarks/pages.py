"""Generated parts of the documentation's pages."""


def between(text: str, marks: tuple[str, str], content: str) -> str:
    """Returns a page with other content between two marks.

    Args:
        text: The page.
        marks: The lines before and after its generated part.
        content: The new part.
    """
    before, _, rest = text.partition(marks[0])
    return before + marks[0] + content + marks[1] + rest.partition(marks[1])[2]
