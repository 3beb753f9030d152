-- Acquires, peeks at or resets counts, gives or ends grants, in one atomic step.
--
-- KEYS     Every key that is used. A key in ARGV is an index into it, 0 for none.
-- ARGV[1]  JSON. Numbers are whole, exact up to 2^53 - 1; -1 stands for none.
--   op               "acquire", "peek", "reset", "grant", "revoke" or "grants"
--   remembered       how long results and attempts are remembered, in seconds
--   compensated      how long compensations are
--   grace            how long counts are kept after their window, in seconds
--   compensations    {marker, attempt, result, amounts = {{count, amount}}, hold}; hold: only of
--                    one that settles a request: the field of what the request holds
--   attempt, result  keys under which the attempt and its result are remembered
--   hold             the field of what the request holds, if a counter has a lease
--   counters         {{count, limit for show, lease in seconds if there is one}}; reset: count only
--   hits             {{counter, amount}}, {threshold} of each call, by index
--   thresholds       {limit, scope, counter, most, enforced}
--   stops            by limit, after how many refused calls it stops the batch
--   grant            {count, name, amount, end, details}; revoke: key and name only
--   A count is {key, end of window, idle, start}; idle: how long one without a window is kept, in
--   seconds; start: where a new one begins.
-- Answers
--   peek     used, limit, end of window, what is granted for each key; used is -2 where something
--            else is kept
--   reset    nothing
--   acquire  "acquired", replayed, stopped, {used of each counter},
--            {{admitted, limit that refuses, scope, next limit, scope ...} of each call}
--            and, if anything is granted, {of each counter}, {its part that is new to calls}
--            "refused": the attempt was compensated before it arrived
--            "again", keys ...: nothing was done; ask the same with these in KEYS
--   grant    whether it is new, amount, end, details of what is kept; nothing if it would be over
--   revoke   amount, end, details of what is ended; nothing if there is none
--   grants   index of the key, amount, end, details of each that has not ended
-- A count is kept as a hash (used, limit, ends), an attempt as what it charged or "refused".
-- Anything else in the place of a count is an error: others can write there, too.
-- What is used includes what is held: a field of the hash for each request, "held:...", has the
-- amount and the end of its lease. No lease ends before the hash's field next_end.
-- The field granted has "name amount end new," of each grant, where new is 0 when a call has been
-- judged by it; "grant:name" has its details. After its end a grant is remembered for as long as a
-- compensation, and the key with it; the count is forgotten when the field "forgotten" says so.
-- The text is read with the count: keys without grants cost nothing.

local ask = cjson.decode(ARGV[1])
local now = tonumber(redis.call('TIME')[1])

-- tonumber() alone would take 'nan', which no limit refuses.
local function whole(text)
  return text and #text <= 17 and string.match(text, '^-?%d+$') and tonumber(text)
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
  if next_end then
    redis.call('HSET', key, 'next_end', next_end)
  else
    redis.call('HDEL', key, 'next_end')
  end
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
  kept_until[key] = last + ask.compensated
  return sum, news
end

-- Whether the count of a key, which grants keep, is over.
local function forgotten(key)
  local time = whole(redis.call('HGET', key, 'forgotten'))
  return time and time <= now
end

local function get(key)
  local text, next_end, grants = unpack(redis.call('HMGET', key, 'used', 'next_end', 'granted'))
  local used = whole(text)
  if text and not (used and used >= 0) then error('no count is kept under ' .. key) end
  if grants and forgotten(key) then
    local kept = redis.call('HGETALL', key)
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

local function peek(key)
  local kept = redis.pcall('HMGET', key, 'used', 'limit', 'ends', 'next_end', 'granted')
  if kept.err then
    if not string.find(kept.err, 'WRONGTYPE', 1, true) then error(kept.err) end
    return -2, -1, -1, 0
  end
  local more = kept[5] and granted(key, kept[5]) or 0
  if kept[5] and forgotten(key) then kept = {[5] = kept[5]} end
  local used, limit, ends = whole(kept[1]), whole(kept[2]), whole(kept[3])
  if not (kept[1] or kept[2] or kept[3]) then
    if kept[5] then return more > 0 and 0 or -1, -1, -1, more end
    if redis.call('EXISTS', key) == 0 then return -1, -1, -1, 0 end
  end
  if not used or used < 0 or (kept[2] and not limit) or (kept[3] and not ends) then
    return -2, -1, -1, 0
  end
  local next_end = whole(kept[4])
  if next_end and next_end <= now then used = math.max(0, used - (overdue(key, now))) end
  return used, limit or -1, ends or -1, more
end

-- When a count is over, and when its key is: grants keep it for longer.
local function expiry(key, ends, idle)
  local over = now + idle
  if ends >= 0 then over = math.max(ends, now) + ask.grace end
  return over, math.max(over, kept_until[key] or 0)
end

-- The last arguments are further fields, and their values.
local function put(key, used, ends, idle, ...)
  local over, expires = expiry(key, ends, idle)
  if kept_until[key] then redis.call('HSET', key, 'forgotten', over) end
  redis.call('HSET', key, 'used', used, 'ends', ends, ...)
  redis.call('EXPIREAT', key, expires)
end

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

-- The fields, and their values, that say that a request holds an amount under a key.
local function hold(key, amount, lease)
  local ends = now + lease + 1
  local before, next_end = unpack(redis.call('HMGET', key, ask.hold, 'next_end'))
  local kept, last = held(before)
  local text = string.format('%.0f %.0f', amount + (kept or 0), math.max(ends, last or ends))
  return ask.hold, text, 'next_end', math.min(ends, whole(next_end) or ends)
end

local function add(count, amount, ...)
  local index, ends, idle, start = unpack(count)
  put(KEYS[index], (get(KEYS[index]) or start) + amount, ends, idle, ...)
end

local function take(key, amount)
  local used = get(key)
  if used then redis.call('HSET', key, 'used', math.max(0, used - amount)) end
end

local function remember(key, value)
  if key > 0 then redis.call('SET', KEYS[key], value, 'EX', ask.remembered) end
end

local function remembered(key)
  return key > 0 and redis.call('GET', KEYS[key])
end

-- What an attempt charged, as {key, amount, field of what it holds}; 0 is charged to the key of its
-- result.
local function charged_by(attempt)
  local record = remembered(attempt)
  return record and record ~= 'refused' and cmsgpack.unpack(record) or {}
end

local function undeclared()
  local declared, found = {}, {'again'}
  for _, key in ipairs(KEYS) do declared[key] = true end
  for _, compensation in ipairs(ask.compensations) do
    if redis.call('EXISTS', KEYS[compensation.marker]) == 0 then
      for _, charged in ipairs(charged_by(compensation.attempt)) do
        if not declared[charged[1]] then table.insert(found, charged[1]) end
      end
    end
  end
  return found
end

local function compensate(compensation)
  if redis.call('EXISTS', KEYS[compensation.marker]) == 1 then return end
  for _, charged in ipairs(charged_by(compensation.attempt)) do
    local key, amount, field = unpack(charged)
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
  local kept = field and ask.remembered or ask.compensated
  redis.call('SET', KEYS[compensation.marker], 1, 'EX', kept)
  if remembered(compensation.result) then return end
  for _, part in ipairs(compensation.amounts) do
    local count, amount = unpack(part)
    if field then release(KEYS[count[1]], field) end
    if amount > 0 then add(count, amount) else take(KEYS[count[1]], -amount) end
  end
end

-- As admit() in admission.py: judges each call on what the ones before it left in counts.
local function admit(counts, more)
  local calls, refusals, stopped = {}, {}, 0
  for i, hits in ipairs(ask.hits) do
    local amounts, refusing, call = {}, {}, {1}
    for _, part in ipairs(hits[1]) do amounts[part[1]] = part[2] end
    for _, index in ipairs(hits[2]) do
      local limit, scope, counter, most, enforced = unpack(ask.thresholds[index])
      if counts[counter] + amounts[counter] > most + (more[counter] or 0) then
        if enforced then call[1] = 0 end
        if not refusing[limit] then
          refusing[limit] = true
          refusals[limit] = (refusals[limit] or 0) + 1
          table.insert(call, limit)
          table.insert(call, scope)
        end
      end
    end
    if call[1] == 1 then
      for counter, amount in pairs(amounts) do counts[counter] = counts[counter] + amount end
    end
    calls[i] = call
  end
  for limit, after in pairs(ask.stops) do
    if (refusals[limit] or 0) >= after then stopped = 1 end
  end
  return calls, stopped
end

local function charge(counts, used, result)
  local record = {}
  for i, counter in ipairs(ask.counters) do
    local count, limit, lease = unpack(counter)
    local key, amount = KEYS[count[1]], counts[i] - used[i]
    if key and amount > 0 then
      if lease then
        add(count, amount, 'limit', limit, hold(key, amount, lease))
        table.insert(record, {key, amount, ask.hold})
      else
        add(count, amount, 'limit', limit)
        table.insert(record, {key, amount})
      end
    end
  end
  if #record == 0 then return end
  if ask.result > 0 then table.insert(record, {KEYS[ask.result], 0}) end
  remember(ask.attempt, cmsgpack.pack(record))
  remember(ask.result, cmsgpack.pack(result))
end

-- Note that a call has been judged by what is granted under a key.
local function see_grants(key)
  local text = redis.call('HGET', key, 'granted')
  redis.call('HSET', key, 'granted', (string.gsub(text, ' 1,', ' 0,')))
end

local function acquire()
  local again = undeclared()
  if #again > 1 then return again end
  for _, compensation in ipairs(ask.compensations) do compensate(compensation) end
  if remembered(ask.attempt) == 'refused' then return {'refused'} end
  local result = remembered(ask.result)
  if result then
    result = cmsgpack.unpack(result)
    result[2], result[7] = 1, nil
    return result
  end
  local used, counts, more, news = {}, {}, {}, {}
  for i, counter in ipairs(ask.counters) do
    local index, _, _, start = unpack(counter[1])
    if index > 0 then used[i], more[i], news[i] = get(KEYS[index]) end
    used[i] = used[i] or start
    counts[i] = used[i]
  end
  local calls, stopped = admit(counts, more)
  result = {'acquired', 0, stopped, used, calls}
  if next(more) then
    for i, counter in ipairs(ask.counters) do
      more[i], news[i] = more[i] or 0, news[i] or 0
      if news[i] > 0 then see_grants(KEYS[counter[1][1]]) end
    end
    result[6], result[7] = more, news
  end
  if stopped == 0 then charge(counts, used, result) end
  return result
end
