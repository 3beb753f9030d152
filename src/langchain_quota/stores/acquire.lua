-- Acquires: makes corrections, and admits or refuses a batch of calls, in one atomic step.
-- ARGV[1]  corrections    {marker, attempt, result, hold, amounts = {{count ..., start, amount, limit}}}
--          attempt, result  keys under which the attempt and its result are remembered
--          hold             the field of what is held: by the request, or by the one that is settled
--          counters         count ..., start, limit, lease of each; start: where a new one begins;
--                           limit: to show; lease: in seconds
--          rollovers        {number of the counter, key of the count before, and the rest of Rollover in
--                           admission.py}
--          thresholds       number of the limit, counter, maximum, whether it is enforced, of each
--          names            limit and scope of each threshold, encoded, with a space between them
--          calls            {counter, amount, counter, amount ...}, {threshold, threshold ...}
--          frozen           the key of the freezes
--          stops            {number of the limit, after how many refused calls it stops the batch}
-- Answer   "refused" if the attempt was corrected before it arrived; {"again", keys ...} if nothing
--   was done, and it is to be sent again with these added to KEYS; or a text, which clients read
--   faster than lists of lists. Its lines:
--     acquired, replayed, stopped; only if anything is frozen: how many freezes there are, and the
--       numbers of the counters whose subjects are frozen, with commas between
--     used of each counter
--     of each call, with commas between: admitted, and names of each limit that refuses it
--     only if anything is granted: the amount of each counter
--     the same, unless replayed: what is new of each amount

-- The count; nil if none is kept.
local function get(key, drains)
  local kept = redis.call('HMGET', key, 'used', 'next_end', 'at', 'rolled_over')
  if kept[4] then rolled_over[key], kept_until[key] = held(kept[4]) end
  local used, next_end, at = whole(kept[1]), whole(kept[2]), whole(kept[3])
  if kept[1] and not (used and used >= 0) then error('no count is kept under ' .. key) end
  if used and at and at > micros() then
    used = math.max(0, used - at + micros())
    redis.call('HSET', key, 'used', digits(used), 'at', digits(micros()))
  end
  if used and next_end and next_end <= now then used = used_without(key, used, now, true) end
  return used and drains and math.max(0, used - micros()) or used
end

-- Notes that a request holds an amount that it has charged under a key, if it does.
local function hold(key, amount, lease)
  if lease < 0 then return end
  local ends = now + lease + 1
  local before, next_end, charged = unpack(redis.call('HMGET', key, ask.hold, 'next_end', 'charged'))
  local kept, last, place = held(before)
  local text = digits(amount + (kept or 0)) .. ' ' .. digits(math.max(ends, last or ends))
  -- If something was charged in between, the place of the first part holds for all.
  if not place or place + amount == whole(charged) then place = charged end
  if charged then text = text .. ' ' .. place end
  redis.call('HSET', key, ask.hold, text, 'next_end', digits(math.min(ends, whole(next_end) or ends)))
end

local function remember(key, value, seconds)
  if key > 0 then redis.call('SET', KEYS[key], value, 'EX', digits(seconds)) end
end

local function remembered(key)
  return key > 0 and redis.call('GET', KEYS[key])
end

-- Lowers a count; if a field is given, by no more than what the field still holds. Returns the part of
-- it that has drained, which is not subtracted again.
local function lower(key, amount, field)
  local used, left = get(key), amount
  local rest, ends, place = held(used and field and redis.call('HGET', key, field))
  if not used or (field and not rest) then return 0 end
  if field then
    amount = math.min(amount, rest)
    if place then return amount - used + used_without(key, used, 0, true, field, amount) end
    left = amount
    redis.call('HDEL', key, field)
    if amount < rest then redis.call('HSET', key, field, digits(rest - amount) .. ' ' .. digits(ends)) end
  end
  redis.call('HSET', key, 'used', digits(math.max(0, used - left)))
  return amount - left
end

-- The key, amount and field of what it holds of each count that an attempt charged; false for no
-- field, and the amount 0 for the key of its result.
local function charged_by(attempt)
  local record = remembered(attempt)
  return record and record ~= 'refused' and cmsgpack.unpack(record) or {}
end

local function correct(correction)
  if redis.call('EXISTS', KEYS[correction.marker]) == 1 then return end
  local charged = charged_by(correction.attempt)
  for i = 1, #charged, 3 do
    local key, amount, field = unpack(charged, i, i + 2)
    if amount == 0 then
      redis.call('DEL', key)
    else
      lower(key, amount, field)
    end
  end
  remember(correction.attempt, 'refused', REMEMBERED)
  remember(correction.marker, 1, correction.hold and REMEMBERED or CORRECTED)
  if remembered(correction.result) then return end
  for _, part in ipairs(correction.amounts) do
    local index, _, ends, idle, drains, start, amount, limit = unpack(part)
    local key, shown = KEYS[index], limit >= 0 and {'limit', digits(limit)} or {}
    local drained = correction.hold and lower(key, math.huge, correction.hold) or 0
    if amount > 0 then amount = math.max(0, amount - drained) end
    if amount > 0 then
      put(key, (get(key, drains) or start) + amount, ends, idle, drains, unpack(shown))
    else
      lower(key, -amount)
    end
  end
end

local declared, again = {}, {'again'}
for i = 1, #ask.corrections > 0 and #KEYS or 0 do declared[KEYS[i]] = true end
for _, correction in ipairs(ask.corrections) do
  local charged = charged_by(correction.attempt)
  for i = 1, #charged, 3 do
    if not declared[charged[i]] then table.insert(again, charged[i]) end
  end
end
if #again > 1 then return again end
for _, correction in ipairs(ask.corrections) do correct(correction) end

-- As admit() in admission.py.
local function admit(counts, more, frozen)
  local calls, refusals, stopped = {}, {}, 0
  for i, asked in ipairs(ask.calls) do
    local added, over = unpack(asked)
    local amounts, refusing, order, runs, call = {}, {}, {}, true, ''
    for j = 1, #added, 2 do amounts[added[j]] = added[j + 1] end
    for _, index in ipairs(over) do
      local limit, counter, most, enforced = unpack(ask.thresholds, 4 * index - 3, 4 * index)
      if frozen[counter] or counts[counter] + amounts[counter] > most + (more[counter] or 0) then
        runs = runs and not enforced
        if not refusing[limit] then
          refusals[limit] = (refusals[limit] or 0) + 1
          table.insert(order, limit)
        end
        if frozen[counter] or not refusing[limit] then refusing[limit] = ask.names[index] end
      end
    end
    for _, limit in ipairs(order) do call = call .. ' ' .. refusing[limit] end
    if runs then
      for counter, amount in pairs(amounts) do counts[counter] = counts[counter] + amount end
    end
    calls[i] = (runs and '1' or '0') .. call
  end
  for _, stop in ipairs(ask.stops) do
    if (refusals[stop[1]] or 0) >= stop[2] then stopped = 1 end
  end
  return table.concat(calls, ','), stopped
end

local function of_counter(i)
  return unpack(ask.counters, 8 * i - 7, 8 * i)
end

-- kept: the counts as charged so far, by key. A new key begins at the start of its first counter.
local function charge(kept, counts, used)
  local record = {}
  for i = 1, #ask.counters / 8 do
    local index, _, ends, idle, drains, start, limit, lease = of_counter(i)
    local key, amount = KEYS[index], counts[i] - used[i]
    if key and amount > 0 then
      kept[index] = (kept[index] or start) + amount
      put(key, kept[index], ends, idle, drains, 'limit', digits(limit))
      hold(key, amount, lease)
      record[#record + 1], record[#record + 2] = key, amount
      record[#record + 1] = lease >= 0 and ask.hold
    end
  end
  return record
end

-- Fixes what rolls over to a count with the first request of its window.
local function roll_over(i, previous, amount, limit, last)
  local index, _, ends, idle, drains, start = of_counter(i)
  local key = KEYS[index]
  local used = get(key, drains) or start
  if rolled_over[key] then return end
  amount = math.max(0, math.min(amount, limit - (get(KEYS[previous]) or 0)))
  rolled_over[key], kept_until[key] = amount, last
  put(key, used, ends, idle, drains, 'rolled_over', digits(amount) .. ' ' .. digits(last))
end

-- The counters whose subjects are frozen, and what the answer says of them.
local function frozen_counters()
  local frozen, numbers, names, freezes = {}, {}, {}, 0
  for _, grant in ipairs(grants_of(KEYS[ask.frozen])) do
    if grant[3] > now then names[cjson.decode(grant[5]).id], freezes = true, freezes + 1 end
  end
  if freezes == 0 then return frozen, '' end
  for i = 1, #ask.counters / 8 do
    local key = KEYS[of_counter(i)] or ''
    local dimension, subject = string.match(key, '^{[^}]*}:count:[^:]*:([^:]+):([^:]*)')
    -- As frozen_counters() in keys.py.
    if dimension and dimension ~= 'concurrency' and dimension ~= 'rate_limiter'
      and (names['::'] or names[':' .. dimension .. ':' .. subject]) then
      frozen[i] = true
      table.insert(numbers, i)
    end
  end
  return frozen, ' ' .. freezes .. ' ' .. table.concat(numbers, ',')
end

local function numbers(values)
  local found = {}
  for i = 1, #ask.counters / 8 do found[i] = digits(values[i] or 0) end
  return table.concat(found, ' ')
end

-- One command for all of these, because mostly there is none: the attempt, its result, grants, and
-- freezes.
local rare = {KEYS[ask.frozen], KEYS[ask.attempt]}
rare[#rare + 1] = KEYS[ask.result]
for i = 2, #ask.counters, 8 do rare[#rare + 1] = KEYS[ask.counters[i]] end
local any_rare = redis.call('EXISTS', unpack(rare)) > 0
if any_rare and remembered(ask.attempt) == 'refused' then return 'refused' end
local result = any_rare and remembered(ask.result)
if result then return 'acquired 1 ' .. result end
local kept, used, counts, more, news, new = {}, {}, {}, {}, {}, ''
for _, rollover in ipairs(ask.rollovers) do roll_over(unpack(rollover)) end
for i = 1, #ask.counters / 8 do
  local index, of_grants, _, _, drains, start = of_counter(i)
  if index > 0 then
    local key = KEYS[index]
    kept[index] = get(key, drains)
    local grants = any_rare and grants_of(KEYS[of_grants]) or {}
    if #grants > 0 then more[i], news[i] = granted(grants) end
    if (rolled_over[key] or 0) > 0 then more[i] = (more[i] or 0) + rolled_over[key] end
  end
  used[i] = kept[index] or start
  counts[i] = used[i]
end
local frozen, marks = {}, ''
if any_rare then frozen, marks = frozen_counters() end
local said, stopped = admit(counts, more, frozen)
result = stopped .. marks .. '\n' .. numbers(used) .. '\n' .. said
if next(more) then
  result, new = result .. '\n' .. numbers(more), '\n' .. numbers(news)
  for i, amount in pairs(news) do
    if amount > 0 then
      -- From now on none of them is new: a call has been checked by them.
      local key = KEYS[ask.counters[8 * i - 6]]
      local grants = grants_of(key)
      for _, grant in ipairs(grants) do grant[4] = false end
      keep_grants(key, grants)
    end
  end
end
local record = stopped == 0 and charge(kept, counts, used) or {}
if #record > 0 then
  if ask.result > 0 then
    record[#record + 1], record[#record + 2], record[#record + 3] = KEYS[ask.result], 0, false
  end
  remember(ask.attempt, cmsgpack.pack(record), REMEMBERED)
  remember(ask.result, result, REMEMBERED)
end
return 'acquired 0 ' .. result .. new
