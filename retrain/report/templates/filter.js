// Hide the samples that do not match the form, and the prompts and steps without a sample.
const form = document.querySelector("form.filter");
const show = (node, shown) => { node.hidden = !shown; return shown; };
function filter() {
  const [verdict, step, text] = ["verdict", "step", "text"].map((name) => form.elements[name].value.toLowerCase());
  let count = 0;
  for (const part of document.querySelectorAll("details[data-step]")) {
    const wanted = !step || part.dataset.step === step;
    let left = 0;
    for (const group of part.querySelectorAll(".group")) {
      const found = [...group.querySelectorAll(".columns > .sample")].filter((sample) =>
        show(sample, wanted && (!verdict || sample.classList.contains(verdict))
          && (!text || group.firstElementChild.textContent.toLowerCase().includes(text)
            || sample.textContent.toLowerCase().includes(text))));
      left += show(group, found.length > 0) ? found.length : 0;
    }
    count += left;
    if (show(part, left > 0) && (step || text)) part.open = true;
  }
  form.querySelector("output").value = `${count.toLocaleString("en")} shown`;
}
form.hidden = false;
form.addEventListener("input", filter);
form.addEventListener("submit", (event) => event.preventDefault());
filter();
