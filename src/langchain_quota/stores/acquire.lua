-- Acquires: makes corrections, and admits or refuses a batch of calls, in one atomic step.
-- KEYS     the freezes; those of an older edition; texts that are remembered; and counts, as redis_rows.py has them
-- ARGV[1]  a list in JSON; numbers are whole, exact up to 2^53 - 1; -1 stands for none, and 0 for no key
--   attempt, result  numbers of keys; hold: the entry of what the request holds, or settles, if it does
--   rules        end of window, idle, drains, freeze of each count; idle: how long one without a window is kept, in
--                seconds; freeze: the entry that freezes its subject. If it drains, its amounts are microseconds
--   corrections  {marker, result, for how long, entry that it settles or '', {{count, start, amount, limit} ...}}
--   counters     count, start, limit, lease, whether it rolls over, of each; start: where a new count begins
--   thresholds   number of the limit, counter, maximum, whether it is enforced, of each
--   calls        {counter, amount, counter, amount ...}, {threshold, threshold ...}
--   stops        {number of the limit, after how many refused calls it stops the batch}
-- ARGV[2]  lines of JSON: names of the thresholds; counters that drain; the attempt, with %s for each amount
-- Answer   JSON, written here since cjson rounds numbers to 14 digits: "refused" if the attempt was corrected before it
--   arrived; "rollover" if that must be fixed first; {counter} if it can hold no more; or {replayed, first line or null,
--   second line, stopped, used and raise of each counter, {admitted, thresholds that refuse it} of each call, how many
--   freezes there are, counters that are frozen, {counter, what is fresh} ...}
local attempt, result, hold, rules, corrections, counters, thresholds, calls, stops = unpack(cjson.decode(ARGV[1]))
local all_names, drains, charges = string.match(ARGV[2], '([^\n]*)\n([^\n]*)\n(.*)')
local time, counts = redis.call('TIME'), {[0] = {raised = 0, fresh = 0, freeze = ''}}  -- 0 for those of the caller
local now = tonumber(time[1])
local micros = now * 1000000 + tonumber(time[2])

-- '%d' is faster, but a server may have it for 32 bits only.
local function digits(number) return string.format(math.abs(number) < 2^31 and '%d' or '%.0f', number) end
local function entry_of(text)
  local amount, ends, place = string.match(text or '', '^(-?%d+) (%d+) (-?%d+)$')
  return amount and {tonumber(amount), tonumber(ends), tonumber(place)}
end
local function set(count, field, value)
  if count[field] ~= value then count[field], count.changed[field] = value, digits(value) end
end
local function keep(count, name, amount, ends, place)
  count.entries[name] = amount and {amount, ends, place} or false
  count.changed[name] = amount and digits(amount) .. ' ' .. digits(ends) .. ' ' .. digits(place) or false
end
local function entry(count, name)
  local is_known = count.complete or count.entries[name] ~= nil
  if not is_known then count.entries[name] = entry_of(redis.call('HGET', count.key, name)) or false end
  return count.entries[name]
end
local function entries(count)
  local kept = count.complete and {} or redis.call('HGETALL', count.key)
  for i = 1, #kept, 2 do
    if count.entries[kept[i]] == nil then count.entries[kept[i]] = entry_of(kept[i + 1]) end
  end
  count.complete = true
  return count.entries
end
-- Like the next three as in counts.py.
local function lower(count, amount, place)
  set(count, 'used', math.max(0, count.used - amount))
  for name, each in pairs(count.drains and amount > 0 and entries(count) or {}) do
    if each and each[3] > place then keep(count, name, each[1], each[2], each[3] - amount) end
  end
end
local function drop(count, name, moment)
  local amount, _, place = unpack(entry(count, name) or {})
  if not amount then return 0 end
  keep(count, name)
  if amount <= 0 then
    set(count, 'raised', count.raised + amount)
    if place == count.checked then set(count, 'fresh', count.fresh + amount) end
    return 0
  end
  local left = count.drains and math.max(0, math.min(amount, place - moment)) or amount
  lower(count, left, place)
  return amount - left
end
local function update(count)
  if count.drains and count.at > micros then
    lower(count, count.at - micros, 0)
    set(count, 'at', micros)
  end
  if count.next_end < 0 or count.next_end > now then return end
  local over, next_end = {}, math.huge
  for name, each in pairs(entries(count)) do
    if each and each[2] <= now then table.insert(over, {name, unpack(each)}) end
    if each and each[2] > now then next_end = math.min(each[2], next_end) end
  end
  table.sort(over, function(a, b) return a[3] < b[3] or a[3] == b[3] and a[4] < b[4] end)
  for _, each in ipairs(over) do drop(count, each[1], each[3] * 1000000) end
  set(count, 'next_end', next_end < math.huge and next_end or -1)
end
local function read(key, window_end, idle, drains, freeze)
  local kept, any, odd = redis.call('HMGET', key, hold, unpack(FIELDS, 1, drains and 7 or 6)), false, false
  for i = 2, #kept do
    -- Others can write there, too, such as 'nan', which no limit refuses.
    local number = kept[i] and tonumber(kept[i])
    any, odd = any or kept[i], odd or kept[i] and not (number and number % 1 == 0 and number <= 2^53)
    kept[i] = number or false
  end
  local held, used, expires, next_end, raised, fresh, checked, at = unpack(kept)
  if odd or any and (expires or -1) < 0 or (used or 0) < 0 then error('no count is kept under ' .. key .. ODD) end
  local count = {
    key = key, window_end = window_end, idle = idle, drains = drains, freeze = freeze, changed = {},
    used = used or nil, expires = expires or -1, next_end = next_end or -1, raised = raised or 0,
    fresh = fresh or 0, checked = checked or 0, at = at or -1, entries = {[hold] = held and entry_of(held) or false},
  }
  update(count)
  return count
end
local function level(count, start)
  return count.used and math.max(0, count.used - (count.drains and micros or 0)) or start
end
local function charge(count, amount, start, limit, lease)
  local total, expires = level(count, start) + amount, now + count.idle
  if count.window_end >= 0 then expires = math.max(count.window_end, now) + GRACE end
  if count.drains then
    expires, total = now + math.ceil(total / 1000000) + GRACE, total + micros
    set(count, 'at', micros)
  end
  set(count, 'used', total)
  set(count, 'ends', count.window_end)
  if limit then set(count, 'limit', limit) end
  set(count, 'expires', count.drains and expires or math.max(expires, count.expires))
  if lease < 0 then return end
  local begin, ends = total - amount, now + lease + 1
  local held, last, place = unpack(entry(count, hold) or {0, ends, begin})
  if place == begin or begin == count.at then place = total end
  keep(count, hold, held + amount, math.max(ends, last), place)
  if count.next_end < 0 or ends < count.next_end then set(count, 'next_end', ends) end
end
-- HSET comes first: a server that is full does it, or nothing.
local function write(answer)
  for _, count in ipairs(counts) do
    local fields, gone = {}, {}
    for field, text in pairs(count.changed) do
      if text then fields[#fields + 1], fields[#fields + 2] = field, text else gone[#gone + 1] = field end
    end
    if #fields > 0 then redis.call('HSET', count.key, unpack(fields)) end
    for _, field in ipairs(gone) do redis.call('HDEL', count.key, field) end
    if count.changed.expires then redis.call('EXPIREAT', count.key, count.changed.expires) end
  end
  return answer
end

-- Nothing is written before all are read: an error changes nothing.
for i = 1, #rules / 4 do counts[i] = read(KEYS[#KEYS - #rules / 4 + i], unpack(rules, 4 * i - 3, 4 * i)) end
for _, correction in ipairs(corrections) do
  local marker, answered, lasts, settles, amounts = unpack(correction)
  local is_done = not redis.call('SET', KEYS[marker], 1, 'NX', 'EX', lasts)
  is_done = is_done or answered > 0 and redis.call('EXISTS', KEYS[answered]) == 1
  for _, part in ipairs(is_done and {} or amounts) do
    local count, start, amount, limit = counts[part[1]], unpack(part, 2)
    local drained = settles ~= '' and drop(count, settles, micros) or 0
    if amount > drained then charge(count, amount - drained, start, limit >= 0 and limit, -1) end
    if amount < 0 and count.used then lower(count, -amount, 0) end
  end
end

-- One command for all of these, because mostly there is none.
local remembered = redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[attempt] or KEYS[2], KEYS[result] or KEYS[2])
local freezes, frozen = 0, {}
if remembered > 0 then
  local row = read(KEYS[1])
  if remembered > 1 or row.expires < 0 then
    if redis.call('EXISTS', KEYS[2]) > 0 then error('no freezes are kept under ' .. KEYS[2] .. ODD) end
    if attempt > 0 and redis.call('GET', KEYS[attempt]) == REFUSED then return write('"refused"') end
    local said = result > 0 and redis.call('GET', KEYS[result])
    if said then return write('[1,' .. said .. ',[]]') end
  end
  counts[#counts + 1], freezes = row, row.raised
  for i = 1, freezes > 0 and #counters / 5 or 0 do
    local freeze = counts[counters[5 * i - 4]].freeze
    frozen[i] = freeze ~= '' and (entry(row, freeze) or entry(row, FREEZE_OF_ALL))
  end
end

local before, after, used, raised, fresh, marks = {}, {}, {}, {}, {}, {}
for i = 1, #counters / 5 do
  local count, start, _, _, rolls = counts[counters[5 * i - 4]], unpack(counters, 5 * i - 3, 5 * i)
  if rolls and not entry(count, 'rollover') then return write('"rollover"') end
  before[i] = level(count, start)
  after[i], used[i], raised[i] = before[i], digits(before[i]), digits(count.raised)
  if count.fresh > 0 then fresh[#fresh + 1] = '[' .. i - 1 .. ',' .. digits(count.fresh) .. ']' end
  if frozen[i] then marks[#marks + 1] = i - 1 end
end
-- As admit() in admission.py.
local said_of_calls, names, refusals, stopped = {}, 'null', {}, 0
for i, call in ipairs(calls) do
  local amounts, places, refusing, runs = {}, {}, {}, true
  for j = 1, #call[1], 2 do amounts[call[1][j]] = call[1][j + 1] end
  for _, index in ipairs(call[2]) do
    local limit, counter, most, enforced = unpack(thresholds, 4 * index - 3, 4 * index)
    if frozen[counter] or after[counter] + amounts[counter] > most + counts[counters[5 * counter - 4]].raised then
      runs, names = runs and not enforced, all_names
      if not places[limit] then places[limit], refusals[limit] = #refusing + 1, (refusals[limit] or 0) + 1 end
      if frozen[counter] or not refusing[places[limit]] then refusing[places[limit]] = ',' .. index - 1 end
    end
  end
  for counter, amount in pairs(runs and amounts or {}) do after[counter] = after[counter] + amount end
  said_of_calls[i] = '[' .. (runs and 1 or 0) .. table.concat(refusing) .. ']'
end
for _, stop in ipairs(stops) do
  if (refusals[stop[1]] or 0) >= stop[2] then stopped, after = 1, before end
end

for i = 1, hold ~= '' and #counters / 5 or 0 do
  local index, _, _, lease = unpack(counters, 5 * i - 4, 5 * i)
  local count = counts[index]
  if lease >= 0 and after[i] > before[i] and count.drains and not entry(count, hold)
    and redis.call('HLEN', count.key) >= MAX_HELD then return write('[' .. i - 1 .. ']') end
end
local amounts, charged = {}, false
for i = 1, #counters / 5 do
  local index, start, limit, lease = unpack(counters, 5 * i - 4, 5 * i)
  local count, amount = counts[index], after[i] - before[i]
  if count.fresh > 0 then set(count, 'checked', count.checked + 1) end
  set(count, 'fresh', 0)
  if index > 0 then amounts[#amounts + 1], charged = digits(amount), charged or amount > 0 end
  if index > 0 and amount > 0 then charge(count, amount, start, limit, lease) end
end
local said = string.format('%s,%s,%d,[%s],[%s],[%s],%d,[%s]', names, drains, stopped, table.concat(used, ','),
  table.concat(raised, ','), table.concat(said_of_calls, ','), freezes, table.concat(marks, ','))
for key, text in pairs(charged and {[attempt] = string.format(charges, unpack(amounts)), [result] = said} or {}) do
  if key > 0 then redis.call('SET', KEYS[key], text, 'EX', REMEMBERED) end
end
return write('[0,' .. said .. ',[' .. table.concat(fresh, ',') .. ']]')
