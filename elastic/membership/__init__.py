"""Who is in the World: the records that agents share, where they are kept, what follows."""
