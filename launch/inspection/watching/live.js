"use strict";
// Asks the server of `megalite watch` every two seconds for what the run has added, and puts it into the page.
(() => {
  const EVERY_MS = 2000;
  const token = new URLSearchParams(location.search).get("token");
  const note = document.createElement("p");
  note.id = "live";
  note.className = "note";
  note.setAttribute("role", "status");
  document.querySelector(".subtitle").after(note);
  let next = "0";
  let shown = document;

  const chartsOf = node => [...node.querySelectorAll(".chart")].map(chart => chart.id).join(" ");

  function replace(old, fresh) {
    const isOpen = [...old.querySelectorAll("details")].map(one => one.open);
    fresh.querySelectorAll("details").forEach((one, place) => { one.open = Boolean(isOpen[place]); });
    if (!old.querySelector(".live") || chartsOf(old) !== chartsOf(fresh)) {
      old.replaceWith(fresh);
      return;
    }
    for (const part of ["figcaption", "details"]) {  // beside curves, which get their numbers alone
      const before = old.querySelectorAll(part), after = fresh.querySelectorAll(part);
      before.forEach((one, place) => { if (after[place]) one.replaceWith(after[place]); });
    }
  }

  // Takes over what differs between the page that was shown last and the one that is to be shown.
  function show(page) {
    const nodes = place => [...place.querySelectorAll("main > [id]:not(#live)")];
    const before = new Map(nodes(shown).map(node => [node.id, node.outerHTML]));
    const main = document.querySelector("main"), fresh = nodes(page), kept = new Set(fresh.map(node => node.id));
    document.querySelector(".subtitle").textContent = page.querySelector(".subtitle").textContent;
    for (const node of nodes(document)) if (!kept.has(node.id)) node.remove();
    let last = null;
    for (const node of fresh) {
      const old = document.getElementById(node.id);
      if (!old && last) last.after(node.cloneNode(true));
      else if (!old) main.append(node.cloneNode(true));
      else if (shown === document || before.get(node.id) !== node.outerHTML) replace(old, node.cloneNode(true));
      last = document.getElementById(node.id);
    }
    for (const curves of JSON.parse(page.getElementById("curves-data").textContent)) megalite.draw(curves);
    shown = page;
  }

  function take(news) {
    next = news.next;
    if (news.page) show(new DOMParser().parseFromString(news.page, "text/html"));  // which runs no script
  }

  function say(sentence, isBad) {
    if (note.textContent !== sentence) note.textContent = sentence;
    note.classList.toggle("bad", isBad);
  }

  async function ask() {
    try {
      const answer = await fetch(`/news?${new URLSearchParams({token, from: next})}`, {cache: "no-store"});
      if (answer.ok) {
        take(await answer.json());
        say(`live: looked at ${new Date().toLocaleTimeString()}`, false);
      } else say(`not live any more: ${(await answer.text()).trim()}`, true);
    } catch (error) {
      say("not live any more: megalite watch does not answer", true);
    }
    setTimeout(ask, EVERY_MS);
  }

  ask();
})();
