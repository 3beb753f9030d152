// What the search of a site finds for phrases: the pages, best first, by phrase.
import { readdirSync, readFileSync } from "node:fs"
import { runInThisContext } from "node:vm"
// The theme's own worker, in place of a browser's.
const [site, ...phrases] = process.argv.slice(2), workers = `${site}/assets/javascripts/workers`
let ask, found
Object.assign(globalThis, {
  self: globalThis, location: { href: "http://localhost/" },
  addEventListener: (_, handler) => { ask = handler }, postMessage: (each) => { found = each },
})
const name = readdirSync(workers).find((each) => /^search.*[.]js$/.test(each))
runInThisContext(readFileSync(`${workers}/${name}`, "utf8"))
const index = JSON.parse(readFileSync(`${site}/search/search_index.json`, "utf8"))
await ask({ data: { type: 0, data: { ...index, options: { suggest: false } } } })
const pages = {}
for (const phrase of phrases) {
  await ask({ data: { type: 2, data: phrase } })
  pages[phrase] = found.data.items.map((each) => each[0].location.split("/")[0])
}
console.log(JSON.stringify(pages))
