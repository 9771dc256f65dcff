"""What self-contained HTML pages are made of: markup, elements, the style; for the report and for explanations."""
