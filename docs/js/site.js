// Typesets what pymdownx.arithmatex has marked, with the copy of KaTeX that comes with the site.
for (const formula of document.querySelectorAll(".arithmatex")) {
  const tex = formula.textContent.trim().slice(2, -2); // without \( \) or \[ \]
  const style = formula.closest(".box") ? "\\displaystyle " : ""; // fractions of full height
  katex.render(style + tex, formula, { displayMode: formula.tagName === "DIV", throwOnError: false });
}

// Keeps keys, and each word of a command, on one line: browsers break them after each hyphen. What is long may break.
for (const code of document.querySelectorAll(":not(pre) > code")) {
  if (code.textContent.length <= 32) code.style.whiteSpace = "nowrap";
  else if (!code.children.length) {
    code.replaceChildren(...code.textContent.split(/( )/).map(word => {
      if (word === " " || word.length > 32) return word;
      const span = Object.assign(document.createElement("span"), { textContent: word });
      span.style.whiteSpace = "nowrap";
      return span;
    }));
  }
}

// Keeps a number and its deviation on one line, and in tables that scroll anyway each cell of numbers.
for (const table of document.querySelectorAll("article table")) {
  const numbers = [...table.querySelectorAll("td")].filter(cell => /^[-+−±\d.e,[\]\s]+$/.test(cell.textContent));
  for (const cell of numbers) if (cell.textContent.includes("±")) cell.style.whiteSpace = "nowrap";
  if (table.scrollWidth > table.closest("article").clientWidth) for (const cell of numbers) cell.style.whiteSpace = "nowrap";
}
