"""Stage `report`: one self-contained page on one verdict, for a person who has to trust or mend a server."""
