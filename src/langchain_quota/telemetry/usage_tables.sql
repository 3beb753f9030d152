-- What subjects have used of their limits. Times are in seconds since the Unix epoch, levels are
-- 0 (ok), 1 (near), 2 (exhausted).

-- A thread, or the subject of a quota.
CREATE TABLE subject (
  id INTEGER PRIMARY KEY,
  agent TEXT NOT NULL,
  scope TEXT NOT NULL,     -- 'thread', or the name of the quota
  name NOT NULL,           -- the label of a thread, or a hash of another subject
  label TEXT,              -- of another subject with series of its own; empty of all, or an agent
  decided REAL NOT NULL,   -- when a call was last judged
  refused REAL NOT NULL,   -- when an enforced limit last refused one, 0 for never
  level INTEGER NOT NULL,  -- the highest of its limits
  share REAL NOT NULL,     -- the highest used share of its limits
  since REAL NOT NULL,     -- when it came to its place among those of its level
  next_end REAL,           -- when the first of its windows ends
  UNIQUE (agent, scope, name)
);
CREATE INDEX idle ON subject (scope = 'thread', decided);
CREATE INDEX shown ON subject (level) WHERE label IS NOT NULL;
CREATE INDEX ranked ON subject (scope = 'thread', level);
CREATE INDEX ending ON subject (next_end) WHERE next_end IS NOT NULL;

-- A limit of an agent, and whose use of it is counted: the series that count subjects.
CREATE TABLE series (
  id INTEGER PRIMARY KEY,
  agent TEXT NOT NULL,
  lim TEXT NOT NULL,
  scope TEXT NOT NULL,
  is_shown INTEGER NOT NULL DEFAULT 0,  -- whether a subject's use has ever been known
  UNIQUE (agent, lim, scope)
);

-- What a subject has used of a limit. A limit of a thread may have several numbers: its own, and
-- one for each of its quotas per thread.
CREATE TABLE usage (
  subject INTEGER NOT NULL REFERENCES subject ON DELETE CASCADE,
  series INTEGER NOT NULL REFERENCES series,
  part TEXT NOT NULL,      -- the name of a quota per thread, or empty
  used INTEGER NOT NULL,
  cap INTEGER,             -- NULL where there is no number, or all is forbidden
  near REAL,               -- the share from which it is near, NULL if the limit is not enforced
  resets_at REAL,          -- when the window ends
  blocked INTEGER NOT NULL,
  decided REAL NOT NULL,   -- when a decision last told what is used
  full_since REAL,         -- when the last of it came to be used
  refused REAL,            -- when the limit last refused a call, NULL for never
  refused_since REAL,      -- when its latest refusals began, of which none is long after another
  unit TEXT NOT NULL,      -- what the numbers count: 'calls', 'tokens' or 'microdollars'
  spent INTEGER NOT NULL,  -- what model calls of a thread have spent in all, at the empty part
  level INTEGER,           -- of all parts, at the empty one, NULL where there is none
  PRIMARY KEY (subject, series, part)
) WITHOUT ROWID;
CREATE INDEX counted ON usage (series, level) WHERE level IS NOT NULL;

-- How full the fullest store in the memory of each process is.
CREATE TABLE store (
  process TEXT PRIMARY KEY, at REAL, keys INTEGER, droppable INTEGER, max_keys INTEGER
) WITHOUT ROWID;

-- What processes that decide nothing themselves have to know.
CREATE TABLE setting (name TEXT PRIMARY KEY, value REAL) WITHOUT ROWID;
