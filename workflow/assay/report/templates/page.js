// Filter, open and link to items. Without this script the page reads the same; nothing of it leaves the page.
"use strict";
(() => {
  const list = document.getElementById("list");
  const form = document.getElementById("filter");
  const openFromLink = () => {
    let target = null;
    try {
      target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    } catch {
      return; // a link that is no link of this page
    }
    if (!(target instanceof HTMLDetailsElement)) return;
    target.open = true;
    if (target.hidden) {
      form.reset();
      filter();
    }
    target.scrollIntoView();
    target.querySelector("summary").focus({ preventScroll: true });
  };
  addEventListener("hashchange", openFromLink);

  if (!list) {
    openFromLink();
    return;
  }
  const [find, kind, standing, shown, nothing] = ["find", "kind", "standing", "shown", "nothing"].map((id) =>
    document.getElementById(id),
  );
  const items = Array.from(list.children, (element) => ({ element, text: element.textContent.toLowerCase() }));

  function filter() {
    const wanted = find.value.trim().toLowerCase();
    let count = 0;
    for (const { element, text } of items) {
      const match =
        (!kind.value || element.dataset.kind === kind.value) &&
        (!standing.value || element.dataset.standing === standing.value) &&
        text.includes(wanted);
      element.hidden = !match;
      count += match;
    }
    shown.textContent = `${count} of ${items.length} items`;
    nothing.hidden = count > 0;
  }
  const openAll = (open) => {
    for (const { element } of items) if (!open || !element.hidden) element.open = open;
  };
  for (const event of ["input", "change"]) form.addEventListener(event, filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("open").addEventListener("click", () => openAll(true));
  document.getElementById("close").addEventListener("click", () => openAll(false));
  filter(); // a browser may have kept what was typed
  openFromLink();
})();
