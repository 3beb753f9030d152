-- Reserves, peeks at or resets counts, in one atomic step.
--
-- KEYS     All keys that are used; a key in ARGV is an index into it, 0 for none.
-- ARGV[1]  JSON; all numbers are whole, exact up to 2^53 - 1, and -1 stands for none.
--   op               "reserve", "peek" or "reset"
--   remembered       how long answers and attempts are remembered, in seconds
--   settled          how long settlements are
--   grace            how long counts are kept after their window, in seconds
--   settlements      {marker, attempt, answer,
--                     amounts = {{key, end of window, idle, amount, where a new count starts}}}
--   attempt, answer  keys under which the attempt and its answer are remembered
--   slots            {key, used, caps = {{limit, index of its stop or 0}}}
--   charges          {{index of the slot, amount}} for each call
--   stops            after how many refused calls each stops the batch
--   keeps            {{key, end of window, idle, limit for show}}; reset: without the limit
--                    idle: how long a count without a window is kept, in seconds
-- Answers a flat array:
--   peek     used, limit, end of window for each key; used is -2 where something else is kept
--   reset    nothing
--   reserve  "granted", known, stopped, number of slots, used of each slot, admitted of each call
--            "refused": the attempt was settled before it arrived
--            "again", keys …: nothing was done; ask the same with these in KEYS
-- A count is a hash (used, limit, ends), an attempt what it charged or "refused". What is kept
-- where a count should be, and is none, is an error: others can write there, too.

local ask = cjson.decode(ARGV[1])
local now = tonumber(redis.call('TIME')[1])

-- tonumber() alone would take 'nan', which no limit refuses.
local function whole(text)
  return text and #text <= 17 and string.match(text, '^-?%d+$') and tonumber(text)
end

local function get(key)
  local text = redis.call('HGET', key, 'used')
  local used = whole(text)
  if text and not (used and used >= 0) then error('no count is kept under ' .. key) end
  return used
end

local function peek(key)
  local kept = redis.pcall('HMGET', key, 'used', 'limit', 'ends')
  if kept.err then
    if not string.find(kept.err, 'WRONGTYPE', 1, true) then error(kept.err) end
    return -2, -1, -1
  end
  local used, limit, ends = whole(kept[1]), whole(kept[2]), whole(kept[3])
  if not (kept[1] or kept[2] or kept[3]) and redis.call('EXISTS', key) == 0 then
    return -1, -1, -1
  end
  if not used or used < 0 or (kept[2] and not limit) or (kept[3] and not ends) then
    return -2, -1, -1
  end
  return used, limit or -1, ends or -1
end

local function put(key, used, ends, idle)
  local expires = ends < 0 and now + idle or math.max(ends, now) + ask.grace
  redis.call('HSET', key, 'used', used, 'ends', ends)
  redis.call('EXPIREAT', key, expires)
end

local function add(key, ends, idle, amount, start)
  local used = get(key)
  if amount > 0 then
    put(key, (used or start) + amount, ends, idle)
  elseif used then
    redis.call('HSET', key, 'used', math.max(0, used + amount))
  end
end

local function remember(key, value)
  if key > 0 then redis.call('SET', KEYS[key], value, 'EX', ask.remembered) end
end

local function known(answer)
  return answer > 0 and redis.call('GET', KEYS[answer])
end

-- What an attempt charged, as {key, amount}; first the key of its answer.
local function charged_by(attempt)
  local record = attempt > 0 and redis.call('GET', KEYS[attempt])
  return record and record ~= 'refused' and cmsgpack.unpack(record) or {}
end

local function undeclared()
  local declared, found = {}, {'again'}
  for _, key in ipairs(KEYS) do declared[key] = true end
  for _, settlement in ipairs(ask.settlements) do
    if redis.call('EXISTS', KEYS[settlement.marker]) == 0 then
      for _, charged in ipairs(charged_by(settlement.attempt)) do
        if not declared[charged[1]] then table.insert(found, charged[1]) end
      end
    end
  end
  return found
end

local function settle(settlement)
  if redis.call('EXISTS', KEYS[settlement.marker]) == 1 then return end
  for i, charged in ipairs(charged_by(settlement.attempt)) do
    if i == 1 then redis.call('DEL', charged[1]) else add(charged[1], -1, 0, -charged[2], 0) end
  end
  remember(settlement.attempt, 'refused')
  redis.call('SET', KEYS[settlement.marker], 1, 'EX', ask.settled)
  if known(settlement.answer) then return end
  for _, part in ipairs(settlement.amounts) do
    add(KEYS[part[1]], part[2], part[3], part[4], part[5])
  end
end

-- As admit() in reservation.py: judges each call on what the ones before it left in counts.
local function admit(counts)
  local admitted, refusals, stopped = {}, {}, 0
  for call, charge in ipairs(ask.charges) do
    local refusing = {}
    for _, part in ipairs(charge) do
      for _, cap in ipairs(ask.slots[part[1]].caps) do
        if counts[part[1]] + part[2] > cap[1] then refusing[cap[2]] = true end
      end
    end
    admitted[call] = next(refusing) == nil and 1 or 0
    for stop in pairs(refusing) do refusals[stop] = (refusals[stop] or 0) + 1 end
    for _, part in ipairs(admitted[call] == 1 and charge or {}) do
      counts[part[1]] = counts[part[1]] + part[2]
    end
  end
  for stop, after in ipairs(ask.stops) do
    if (refusals[stop] or 0) >= after then stopped = 1 end
  end
  return admitted, stopped
end

local function judge()
  local answer, counts, base, charged = {'granted', 0, 0, #ask.slots}, {}, {}, {}
  for i, slot in ipairs(ask.slots) do
    counts[i] = slot.key > 0 and get(KEYS[slot.key]) or slot.used
    table.insert(answer, counts[i])
  end
  local admitted, stopped = admit(counts)
  answer[3] = stopped
  for _, each in ipairs(admitted) do table.insert(answer, each) end
  for i, slot in ipairs(ask.slots) do
    local before = answer[4 + i]
    if stopped == 0 and slot.key > 0 and counts[i] ~= before then
      base[slot.key] = base[slot.key] or before
      charged[slot.key] = (charged[slot.key] or 0) + counts[i] - before
    end
  end
  return answer, base, charged
end

local function charge(answer, base, charged)
  local record = {{KEYS[ask.answer] or KEYS[ask.attempt], 0}}
  for _, keep in ipairs(ask.keeps) do
    local index, ends, idle, limit = unpack(keep)
    if charged[index] then
      put(KEYS[index], base[index] + charged[index], ends, idle)
      redis.call('HSET', KEYS[index], 'limit', limit)
      table.insert(record, {KEYS[index], charged[index]})
    end
  end
  remember(ask.attempt, cmsgpack.pack(record))
  answer[2] = 1
  remember(ask.answer, cmsgpack.pack(answer))
  answer[2] = 0
end

local function reserve()
  local again = undeclared()
  if #again > 1 then return again end
  for _, settlement in ipairs(ask.settlements) do settle(settlement) end
  if ask.attempt > 0 and redis.call('GET', KEYS[ask.attempt]) == 'refused' then
    return {'refused'}
  end
  local answer = known(ask.answer)
  if answer then return cmsgpack.unpack(answer) end
  local base, charged
  answer, base, charged = judge()
  if next(charged) then charge(answer, base, charged) end
  return answer
end

if ask.op == 'reserve' then return reserve() end
local answer = {}
for i, key in ipairs(KEYS) do
  if ask.op == 'reset' then
    put(key, 0, ask.keeps[i][2], ask.keeps[i][3])
  else
    for _, number in ipairs({peek(key)}) do table.insert(answer, number) end
  end
end
return answer
