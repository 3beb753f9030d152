-- Acquires, peeks at or resets counts, gives or ends grants, in one atomic step.
-- KEYS     Every key that is used. A key in ARGV is an index into it, 0 for none.
-- ARGV[1]  "acquire", "peek", "reset", "grant", "revoke" or "grants"
-- ARGV[2]  JSON, or an empty text. Numbers are whole, exact up to 2^53 - 1; -1 stands for none.
--   compensations    {marker, attempt, result, amounts = {{count ..., amount, limit}}, hold}
--   hold             the field of what is held: by the request, or by the one that is settled
--   counts           reset: the counts that become 0
--   grant            {count ..., name, amount, end, details}; revoke: {key, name}
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
-- Answer   acquire: "refused" if the attempt was compensated before it arrived; {"again", keys ...}
--   if nothing was done, and it is to be sent again with these added to KEYS; or a text, which clients
--   read faster than lists of lists. Its lines:
--     acquired, replayed, stopped
--     used of each counter
--     of each call, with commas between: admitted, and each limit that refuses it, scope
--     only if anything is granted: the amount of each counter
--     the same, unless replayed: what is new of each amount
-- A count is kept as a hash (used, limit, ends), an attempt as what it charged or "refused", a result
-- as the text of its answer, from "stopped" on, without what is new of grants. Anything else in the
-- place of a count is an error: others can write there, too.
-- What is used includes what is held: a field "held:..." of the hash for each request has the amount
-- and the end of its lease. No lease ends before the hash's field next_end.
-- The field granted has a list of {name, amount, end, new, details}; new: no call has been judged by
-- the grant. After its end a grant is remembered for as long as a compensation, and the key with it;
-- the count is over when the field forgotten says so. Keys without grants cost nothing.
-- A line in front of this file has the constants REMEMBERED, COMPENSATED and GRACE, in seconds.

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
  texts[number] = texts[number] or string.format(number < 2^31 and '%d' or '%.0f', number)
  return texts[number]
end

-- The amount, and the end of the lease; nothing if the text is not that of a hold.
local function held(text)
  local amount, ends = string.match(text or '', '^(%d+) (%d+)$')
  amount, ends = whole(amount), whole(ends)
  if amount and ends then return amount, ends end
end

-- What is used without the holds whose leases end by then; they are removed only if it is asked for.
local function used_without(key, used, by, removes)
  local next_end, kept = '', redis.call('HGETALL', key)
  for i = 1, #kept, 2 do
    local part, ends = held(string.sub(kept[i], 1, 5) == 'held:' and kept[i + 1])
    if part and ends > by then
      next_end = digits(math.min(ends, whole(next_end) or ends))
    elseif part then
      used = math.max(0, used - part)
      if removes then redis.call('HDEL', key, kept[i]) end
    end
  end
  if removes then redis.call('HSET', key, 'used', digits(used), 'next_end', next_end) end
  return used
end

local kept_until = {}  -- by key: how long grants keep it

-- What is granted by a packed list, and the part by which no call has been judged before.
local function granted(key, packed)
  local sum, news, last = 0, 0, 0
  for _, grant in ipairs(cmsgpack.unpack(packed)) do
    local _, amount, ends, new = unpack(grant)
    last = math.max(last, ends)
    if ends > now then
      sum = sum + amount
      if new then news = news + amount end
    end
  end
  kept_until[key] = last + COMPENSATED
  return sum, news
end

-- A key without a count, which only grants keep.
local function keep_grants(key, packed)
  redis.call('DEL', key)
  redis.call('HSET', key, 'granted', packed)
  local sum, news = granted(key, packed)
  redis.call('EXPIREAT', key, digits(kept_until[key]))
  return nil, sum, news
end

-- The count, what is granted, and what of it is new; nil for what is not kept.
local function get(key)
  local kept = redis.call('HMGET', key, 'used', 'next_end', 'granted', 'forgotten')
  local used, next_end, grants, over = whole(kept[1]), whole(kept[2]), kept[3], whole(kept[4])
  if kept[1] and not (used and used >= 0) then error('no count is kept under ' .. key) end
  if grants and over and over <= now then return keep_grants(key, grants) end
  if used and next_end and next_end <= now then used = used_without(key, used, now, true) end
  if grants then return used, granted(key, grants) end
  return used
end

-- Grants keep a key for longer than its count. The last arguments are further fields, and values.
local function put(key, used, ends, idle, ...)
  local over, kept = ends < 0 and now + idle or math.max(ends, now) + GRACE, kept_until[key]
  if kept then redis.call('HSET', key, 'forgotten', digits(over)) end
  redis.call('HSET', key, 'used', digits(used), 'ends', digits(ends), ...)
  redis.call('EXPIREAT', key, digits(math.max(over, kept or 0)))
end

-- The fields, and their values, that say that a request holds an amount under a key, if it does.
local function hold(key, amount, lease)
  if lease < 0 then return end
  local ends = now + lease + 1
  local before, next_end = unpack(redis.call('HMGET', key, ask.hold, 'next_end'))
  local kept, last = held(before)
  local text = digits(amount + (kept or 0)) .. ' ' .. digits(math.max(ends, last or ends))
  return ask.hold, text, 'next_end', digits(math.min(ends, whole(next_end) or ends))
end

local function remember(key, value, seconds)
  if key > 0 then redis.call('SET', KEYS[key], value, 'EX', digits(seconds)) end
end

local function remembered(key)
  return key > 0 and redis.call('GET', KEYS[key])
end

-- Lowers a count; if a field is given, by no more than what the field still holds.
local function lower(key, amount, field)
  local used = get(key)
  local rest, ends = held(used and field and redis.call('HGET', key, field))
  if not used or (field and not rest) then return end
  if field then
    amount = math.min(amount, rest)
    redis.call('HDEL', key, field)
    if amount < rest then
      redis.call('HSET', key, field, digits(rest - amount) .. ' ' .. digits(ends))
    end
  end
  redis.call('HSET', key, 'used', digits(math.max(0, used - amount)))
end

-- Each {key, amount, field of what it holds} that an attempt charged; 0 to the key of its result.
local function charged_by(attempt)
  local record = remembered(attempt)
  return record and record ~= 'refused' and cmsgpack.unpack(record) or {}
end

local function compensate(compensation)
  if redis.call('EXISTS', KEYS[compensation.marker]) == 1 then return end
  for _, charged in ipairs(charged_by(compensation.attempt)) do
    local key, amount, field = unpack(charged)
    if amount == 0 then
      redis.call('DEL', key)
    else
      lower(key, amount, field)
    end
  end
  remember(compensation.attempt, 'refused', REMEMBERED)
  remember(compensation.marker, 1, compensation.hold and REMEMBERED or COMPENSATED)
  if remembered(compensation.result) then return end
  for _, part in ipairs(compensation.amounts) do
    local index, ends, idle, start, amount, limit = unpack(part)
    local key, shown = KEYS[index], limit and {'limit', digits(limit)} or {}
    if compensation.hold then lower(key, math.huge, compensation.hold) end
    if amount > 0 then
      put(key, (get(key) or start) + amount, ends, idle, unpack(shown))
    else
      lower(key, -amount)
    end
  end
end

if ask.compensations then
  local declared, again = {}, {'again'}
  for _, key in ipairs(KEYS) do declared[key] = true end
  for _, compensation in ipairs(ask.compensations) do
    for _, charged in ipairs(charged_by(compensation.attempt)) do
      if not declared[charged[1]] then table.insert(again, charged[1]) end
    end
  end
  if #again > 1 then return again end
  for _, compensation in ipairs(ask.compensations) do compensate(compensation) end
end

-- The limit and the scope of each threshold.
local function names_of_thresholds()
  local found = {}
  for name in string.gmatch(ARGV[4], '([^ ]* [^ ]*) ') do table.insert(found, name) end
  return found
end

-- As admit() in admission.py. Thresholds are where the first one is, the calls behind them.
local function admit(counts, more, first, thresholds, number, stops)
  local calls, refusals, names, stopped, at = {}, {}, nil, 0, first + 32 * thresholds
  for i = 1, number do
    local amounts, refusing, runs, call, hits, tried = {}, {}, true, ''
    hits, tried, at = struct.unpack('>dd', ARGV[3], at)
    for _ = 1, hits do
      local counter, amount = struct.unpack('>dd', ARGV[3], at)
      amounts[counter], at = amount, at + 16
    end
    for _ = 1, tried do
      local index = struct.unpack('>d', ARGV[3], at)
      at = at + 8
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
    local limit, after = struct.unpack('>dd', ARGV[3], at)
    if (refusals[limit] or 0) >= after then stopped = 1 end
    at = at + 16
  end
  return table.concat(calls, ','), stopped
end

-- kept: the counts as charged so far, by key. A new key begins at the start of its first counter.
local function charge(counters, kept, counts, used)
  local record = {}
  for i, counter in ipairs(counters) do
    local index, ends, idle, start, limit, lease = unpack(counter)
    local key, amount = KEYS[index], counts[i] - used[i]
    if key and amount > 0 then
      kept[index] = (kept[index] or start) + amount
      put(key, kept[index], ends, idle, 'limit', digits(limit), hold(key, amount, lease))
      table.insert(record, {key, amount, lease >= 0 and ask.hold or nil})
    end
  end
  return record
end

local function numbers(values)
  local found = {}
  for i = 1, #values do found[i] = digits(values[i]) end
  return table.concat(found, ' ')
end

-- From now on no grant of a key is new: a call has been judged by them.
local function judged(key)
  local grants = cmsgpack.unpack(redis.call('HGET', key, 'granted'))
  for _, grant in ipairs(grants) do grant[4] = false end
  redis.call('HSET', key, 'granted', cmsgpack.pack(grants))
end

local function acquire()
  local attempt, answered, number_of_counters, thresholds, calls, stops, first =
    struct.unpack('>dddddd', ARGV[3])
  if remembered(attempt) == 'refused' then return 'refused' end
  local result = remembered(answered)
  if result then return 'acquired 1 ' .. result end
  local counters, kept, used, counts, more, news, new = {}, {}, {}, {}, {}, {}, ''
  for i = 1, number_of_counters do
    counters[i] = {struct.unpack('>dddddd', ARGV[3], first + 48 * (i - 1))}
    local index, _, _, start = unpack(counters[i])
    if index > 0 then kept[index], more[i], news[i] = get(KEYS[index]) end
    used[i] = kept[index] or start
    counts[i] = used[i]
  end
  local said, stopped = admit(counts, more, first + 48 * #counters, thresholds, calls, stops)
  result = stopped .. '\n' .. numbers(used) .. '\n' .. said
  if next(more) then
    for i, counter in ipairs(counters) do
      more[i], news[i] = more[i] or 0, news[i] or 0
      if news[i] > 0 then judged(KEYS[counter[1]]) end
    end
    result, new = result .. '\n' .. numbers(more), '\n' .. numbers(news)
  end
  local record = stopped == 0 and charge(counters, kept, counts, used) or {}
  if #record > 0 then
    if answered > 0 then table.insert(record, {KEYS[answered], 0}) end
    remember(attempt, cmsgpack.pack(record), REMEMBERED)
    remember(answered, result, REMEMBERED)
  end
  return 'acquired 0 ' .. result .. new
end
