"""From texts to findings with their places, to fixes and to reports: `dsrun validate`."""
