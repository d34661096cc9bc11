"""From texts to findings with their places, to fixes and to reports: what `dsrun validate` is made of."""
