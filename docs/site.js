// Wide tables scroll; by keyboard only what can have the focus does.
const focusable = () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) box.tabIndex = 0;
};
addEventListener("load", () => setTimeout(focusable, 100));
