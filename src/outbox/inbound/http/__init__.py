"""HTTP: what others send is stored first, answered then, and handled from the database."""
