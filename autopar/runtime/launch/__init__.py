"""How processes of a run are started (`agent`), what each of them runs (`script`), and its mesh (`mesh`)."""
