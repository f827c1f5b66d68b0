"""Files that are renamed keep their place."""

from tests import order


def test_every_file_in_the_order_is_there():
    assert [path for path in order.PLACES if not path.is_file()] == []
