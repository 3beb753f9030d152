-- Acquires, peeks at or resets counts, gives or ends grants, in one atomic step.
--
-- KEYS     Every key that is used. A key in ARGV is an index into it, 0 for none.
-- ARGV[1]  "acquire", "peek", "reset", "grant", "revoke" or "grants"
-- ARGV[2]  JSON, or an empty text. Numbers are whole, exact up to 2^53 - 1; -1 stands for none.
--   compensations    {marker, attempt, result, amounts = {{count, amount}}, hold}; hold: only of
--                    one that settles a request: the field of what the request holds
--   hold             the field of what the request holds, if a counter has a lease
--   counts           reset: the counts that become 0
--   grant            {count, name, amount, end, details}; revoke: key and name only
--   A count is {key, end of window, idle, start}; idle: how long one without a window is kept, in
--   seconds; start: where a new one begins.
-- ARGV[3]  acquire: such numbers as doubles, the high byte first, in this order
--   attempt, result                  keys under which the attempt and its result are remembered
--   four numbers                     how many counters, thresholds, calls and stops follow
--   key, end of window, idle, start, limit to show, lease in seconds       of each counter
--   number of the limit, counter, maximum, whether it is enforced          of each threshold
--   how many hits and thresholds; counter, amount of each hit; threshold   of each call
--   number of the limit, after how many refused calls it stops the batch   of each stop
-- ARGV[4]  acquire: "limit scope " of each threshold, with encoded names
-- Answers
--   peek     used, limit, end of window, what is granted for each key; used is -2 where something
--            else is kept
--   reset    nothing
--   acquire  a text, which clients read faster than lists of lists. Its lines:
--              acquired, replayed, stopped
--              used of each counter
--              of each call, with commas between: admitted, and each limit that refuses it, scope
--              only if anything is granted: the amount of each counter
--              the same, unless replayed: what is new of each amount
--            "refused": the attempt was compensated before it arrived
--            {"again", keys ...}: nothing was done; send it again, with these added to KEYS
--   grant    whether it is new, amount, end, details of what is kept; nothing if it would be over
--   revoke   amount, end, details of what is ended; nothing if there is none
--   grants   index of the key, amount, end, details of each that has not ended
-- A count is kept as a hash (used, limit, ends), an attempt as what it charged or "refused".
-- A result is kept as the text of its answer, from "stopped" on, without what is new of grants.
-- Anything else in the place of a count is an error: others can write there, too.
-- What is used includes what is held: a field of the hash for each request, "held:...", has the
-- amount and the end of its lease. No lease ends before the hash's field next_end.
-- The field granted has "name amount end new," of each grant, where new is 0 when a call has been
-- judged by it; "grant:name" has its details. After its end a grant is remembered for as long as a
-- compensation, and the key with it; the count is forgotten when the field "forgotten" says so.
-- The text is read with the count: keys without grants cost nothing.
-- A line in front of this file defines, in seconds, how long results and attempts are remembered
-- (REMEMBERED), how long compensations are (COMPENSATED), and how long counts are kept after their
-- window (GRACE).

local ask = ARGV[2] == '' and {} or cjson.decode(ARGV[2])
local now = tonumber(redis.call('TIME')[1])

-- tonumber() alone would take 'nan', which no limit refuses.
local function whole(text)
  return text and #text <= 17 and string.match(text, '^-?%d+$') and tonumber(text)
end

-- The text of a whole number from -1, made once: '%.0f', and what Redis makes of a number by itself,
-- take longer than a command. '%d' is faster, but a server may have it for 32 bits only.
local texts = {}
local function digits(number)
  local made = texts[number] or string.format(number < 2^31 and '%d' or '%.0f', number)
  texts[number] = made
  return made
end

-- The amount, and the end of the lease; nothing if the text is not that of a hold.
local function held(text)
  local amount, ends = string.match(text or '', '^(%d+) (%d+)$')
  amount, ends = whole(amount), whole(ends)
  if amount and ends then return amount, ends end
end

-- What is held under a key whose leases end by then: the amount, the fields, the next end.
local function overdue(key, by)
  local amount, fields, next_end, kept = 0, {}, nil, redis.call('HGETALL', key)
  for i = 1, #kept, 2 do
    local part, ends = held(string.sub(kept[i], 1, 5) == 'held:' and kept[i + 1])
    if part and ends <= by then
      amount = amount + part
      table.insert(fields, kept[i])
    elseif part then
      next_end = math.min(ends, next_end or ends)
    end
  end
  return amount, fields, next_end
end

local function give_back(key, used, by)
  local amount, fields, next_end = overdue(key, by)
  for _, field in ipairs(fields) do redis.call('HDEL', key, field) end
  redis.call('HDEL', key, 'next_end')
  if next_end then redis.call('HSET', key, 'next_end', next_end) end
  if amount > 0 then redis.call('HSET', key, 'used', math.max(0, used - amount)) end
  return math.max(0, used - amount)
end

-- By key: how long grants keep it.
local kept_until = {}

-- Each grant of a text, as {name, amount, end, new}.
local function grants_of(text)
  local found = {}
  for name, amount, ends, new in string.gmatch(text or '', '(%x+) (%d+) (%d+) (%d),') do
    amount, ends = whole(amount), whole(ends)
    if amount and ends then table.insert(found, {name, amount, ends, new}) end
  end
  return found
end

-- What is granted under a key, and the part by which no call has been judged before.
local function granted(key, text)
  local sum, news, last = 0, 0, 0
  for _, grant in ipairs(grants_of(text)) do
    local _, amount, ends, new = unpack(grant)
    last = math.max(last, ends)
    if ends > now then
      sum = sum + amount
      if new == '1' then news = news + amount end
    end
  end
  kept_until[key] = last + COMPENSATED
  return sum, news
end

-- Whether the count of a key, which grants keep, is over.
local function forgotten(key)
  local time = whole(redis.call('HGET', key, 'forgotten'))
  return time and time <= now
end

local function get(key)
  local kept = redis.call('HMGET', key, 'used', 'next_end', 'granted')
  local used, next_end, grants = whole(kept[1]), kept[2], kept[3]
  if kept[1] and not (used and used >= 0) then error('no count is kept under ' .. key) end
  if grants and forgotten(key) then
    kept = redis.call('HGETALL', key)
    for i = 1, #kept, 2 do
      if kept[i] ~= 'granted' and string.sub(kept[i], 1, 6) ~= 'grant:' then
        redis.call('HDEL', key, kept[i])
      end
    end
    return nil, granted(key, grants)
  end
  next_end = used and whole(next_end)
  if next_end and next_end <= now then used = give_back(key, used, now) end
  if grants then return used, granted(key, grants) end
  return used
end

-- When a count is over, and when its key is: grants keep it for longer.
local function expiry(key, ends, idle)
  local over = now + idle
  if ends >= 0 then over = math.max(ends, now) + GRACE end
  return over, math.max(over, kept_until[key] or 0)
end

-- The last arguments are further fields, and their values.
local function put(key, used, ends, idle, ...)
  local over, expires = expiry(key, ends, idle)
  if kept_until[key] then redis.call('HSET', key, 'forgotten', over) end
  redis.call('HSET', key, 'used', digits(used), 'ends', digits(ends), ...)
  redis.call('EXPIREAT', key, digits(expires))
end

-- The fields, and their values, that say that a request holds an amount under a key, if it does.
local function hold(key, amount, lease)
  if lease < 0 then return end
  local ends = now + lease + 1
  local before, next_end = unpack(redis.call('HMGET', key, ask.hold, 'next_end'))
  local kept, last = held(before)
  local text = string.format('%.0f %.0f', amount + (kept or 0), math.max(ends, last or ends))
  return ask.hold, text, 'next_end', math.min(ends, whole(next_end) or ends)
end

local function remember(key, value)
  if key > 0 then redis.call('SET', KEYS[key], value, 'EX', digits(REMEMBERED)) end
end

local function remembered(key)
  return key > 0 and redis.call('GET', KEYS[key])
end

if ask.compensations then
  -- What a request still holds under a key, or a part of it if a maximum is given.
  local function release(key, field, most)
    local used = get(key)
    local amount, ends = held(redis.call('HGET', key, field))
    if not used or not amount then return end
    local part = math.min(amount, most or amount)
    if part < amount then
      redis.call('HSET', key, field, string.format('%.0f %.0f', amount - part, ends))
    else
      redis.call('HDEL', key, field)
    end
    redis.call('HSET', key, 'used', math.max(0, used - part))
  end

  local function take(key, amount)
    local used = get(key)
    if used then redis.call('HSET', key, 'used', math.max(0, used - amount)) end
  end

  -- What an attempt charged: key, amount, field of what it holds or false, key ... The key of its
  -- result is charged 0.
  local function charged_by(attempt)
    local record = remembered(attempt)
    return record and record ~= 'refused' and cmsgpack.unpack(record) or {}
  end

  local function undeclared()
    local declared, found = {}, {'again'}
    for _, key in ipairs(KEYS) do declared[key] = true end
    for _, compensation in ipairs(ask.compensations) do
      if redis.call('EXISTS', KEYS[compensation.marker]) == 0 then
        local charged = charged_by(compensation.attempt)
        for i = 1, #charged, 3 do
          if not declared[charged[i]] then table.insert(found, charged[i]) end
        end
      end
    end
    return found
  end

  local function compensate(compensation)
    if redis.call('EXISTS', KEYS[compensation.marker]) == 1 then return end
    local charged = charged_by(compensation.attempt)
    for i = 1, #charged, 3 do
      local key, amount, field = charged[i], charged[i + 1], charged[i + 2]
      if amount == 0 then
        redis.call('DEL', key)
      elseif field then
        release(key, field, amount)
      else
        take(key, amount)
      end
    end
    remember(compensation.attempt, 'refused')
    local field = compensation.hold
    local kept = field and REMEMBERED or COMPENSATED
    redis.call('SET', KEYS[compensation.marker], 1, 'EX', kept)
    if remembered(compensation.result) then return end
    for _, part in ipairs(compensation.amounts) do
      local count, amount = unpack(part)
      if field then release(KEYS[count[1]], field) end
      local index, ends, idle, start = unpack(count)
      if amount > 0 then
        put(KEYS[index], (get(KEYS[index]) or start) + amount, ends, idle)
      else
        take(KEYS[index], -amount)
      end
    end
  end

  local again = undeclared()
  if #again > 1 then return again end
  for _, compensation in ipairs(ask.compensations) do compensate(compensation) end
end

-- The limit and the scope of each threshold.
local function names_of_thresholds()
  local found = {}
  for name in string.gmatch(ARGV[4], '([^ ]* [^ ]*) ') do table.insert(found, name) end
  return found
end

-- As admit() in admission.py: judges each call on what the ones before it left in counts. Thresholds
-- are where the first one is, the calls behind them.
local function admit(counts, more, first, thresholds, number, stops)
  local calls, refusals, names, stopped = {}, {}, nil, 0
  local at = first + 32 * thresholds
  for i = 1, number do
    local amounts, refusing, runs, call, hits, tried = {}, {}, true, ''
    hits, tried, at = struct.unpack('>dd', ARGV[3], at)
    for _ = 1, hits do
      local counter, amount
      counter, amount, at = struct.unpack('>dd', ARGV[3], at)
      amounts[counter] = amount
    end
    for _ = 1, tried do
      local index
      index, at = struct.unpack('>d', ARGV[3], at)
      local limit, counter, most, enforced =
        struct.unpack('>dddd', ARGV[3], first + 32 * (index - 1))
      if counts[counter] + amounts[counter] > most + (more[counter] or 0) then
        runs = runs and enforced == 0
        if not refusing[limit] then
          refusing[limit] = true
          refusals[limit] = (refusals[limit] or 0) + 1
          names = names or names_of_thresholds()
          call = call .. ' ' .. names[index]
        end
      end
    end
    if runs then
      for counter, amount in pairs(amounts) do counts[counter] = counts[counter] + amount end
    end
    calls[i] = (runs and '1' or '0') .. call
  end
  for _ = 1, stops do
    local limit, after
    limit, after, at = struct.unpack('>dd', ARGV[3], at)
    if (refusals[limit] or 0) >= after then stopped = 1 end
  end
  return table.concat(calls, ','), stopped
end

local function note(record, key, amount, field)
  local last = #record
  record[last + 1], record[last + 2], record[last + 3] = key, amount, field
end

-- kept: the counts as charged so far, by key. A new key begins at the start of its first counter.
local function charge(first, kept, counts, used)
  local record = {}
  for i = 1, #counts do
    local amount = counts[i] - used[i]
    if amount > 0 then
      local index, ends, idle, start, limit, lease =
        struct.unpack('>dddddd', ARGV[3], first + 48 * (i - 1))
      local key = KEYS[index]
      if key then
        kept[index] = (kept[index] or start) + amount
        put(key, kept[index], ends, idle, 'limit', digits(limit), hold(key, amount, lease))
        note(record, key, amount, lease >= 0 and ask.hold)
      end
    end
  end
  return record
end

local function numbers(values)
  local found = {}
  for i = 1, #values do found[i] = digits(values[i]) end
  return table.concat(found, ' ')
end

local function acquire()
  local attempt, answered, counters, thresholds, number, stops, first =
    struct.unpack('>dddddd', ARGV[3])
  if remembered(attempt) == 'refused' then return 'refused' end
  local result = remembered(answered)
  if result then return 'acquired 1 ' .. result end
  local kept, used, counts, more, news = {}, {}, {}, {}, {}
  for i = 1, counters do
    local index, _, _, start = struct.unpack('>dddd', ARGV[3], first + 48 * (i - 1))
    if index > 0 then kept[index], more[i], news[i] = get(KEYS[index]) end
    used[i] = kept[index] or start
    counts[i] = used[i]
  end
  local calls, stopped = admit(counts, more, first + 48 * counters, thresholds, number, stops)
  result = stopped .. '\n' .. numbers(used) .. '\n' .. calls
  local new = ''
  if next(more) then
    for i = 1, counters do
      more[i], news[i] = more[i] or 0, news[i] or 0
      if news[i] > 0 then  -- a call has been judged by them now
        local key = KEYS[struct.unpack('>d', ARGV[3], first + 48 * (i - 1))]
        local text = redis.call('HGET', key, 'granted')
        redis.call('HSET', key, 'granted', (string.gsub(text, ' 1,', ' 0,')))
      end
    end
    result, new = result .. '\n' .. numbers(more), '\n' .. numbers(news)
  end
  local record = stopped == 0 and charge(first, kept, counts, used) or {}
  if #record > 0 then
    if answered > 0 then note(record, KEYS[answered], 0, false) end
    remember(attempt, cmsgpack.pack(record))
    remember(answered, result)
  end
  return 'acquired 0 ' .. result .. new
end

if ARGV[1] == 'acquire' then return acquire() end
