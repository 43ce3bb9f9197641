"""Tables for people: texts in columns."""


def aligned(rows, left=1):
    """[line] of rows of equally many texts: columns of one width, the first `left` to the left, the others to the
    right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) if i < left else cell.rjust(width)
                      for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def ruled(rows, left=1):
    """The same as one text, with a rule below the first row, its head, and above the last, its sums."""
    head, *body, sums = aligned(rows, left)
    rule = "-" * len(head)
    return "\n".join([head, rule, *body, rule, sums])
