-- What the scripts share. A script follows these lines; a line before them has the constants
-- REMEMBERED, CORRECTED and GRACE, in seconds.
-- KEYS     every key that is used; a key in ARGV[1] is an index into it, 0 for none
-- ARGV[1]  JSON; numbers are whole, exact up to 2^53 - 1, and -1 stands for none. A count is {key, key
--          of its grants, end of window, idle, drains}; idle: how long one without a window is kept, in
--          seconds. All amounts and maximums of one that drains are microseconds
-- Kept are
--   a count     a hash: used, limit, ends. One that drains falls by one each microsecond: kept as used
--               is when it is 0, since the Unix epoch; at is the server's time of its last change, so
--               that a clock which goes back takes the count with it; charged is all that was ever
--               added, without what holds gave back. What is used includes what is held: a field
--               "held:..." for each request has the amount and the end of its lease, and what was
--               charged up to it if the count drains. No lease ends before the field next_end.
--               rolled_over has what rolled over from the window before, and until when to keep the
--               count for it. Anything else is an error: others can write there, too.
--   grants      of a count, under a key of their own: a packed list of {name, amount, end, new,
--               details}; new: no call has been checked by it. After its end a grant is remembered
--               for as long as a correction. Those under "::" are the freezes, of 0: the id in the
--               details is ":tenant:acme" for the counts of a subject, and "::" for all.
--   an attempt  a packed list, see charged_by, or "refused"
--   a result    the text of its answer

local ask = cjson.decode(ARGV[1])
local now = tonumber(redis.call('TIME')[1])

local function micros()
  return now * 1000000 + tonumber(redis.call('TIME')[2])
end

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

-- The amount, the end of the lease, and what was charged up to it; nothing if the text is no hold.
local function held(text)
  local amount, ends, charged = string.match(text or '', '^(%d+) (%d+) ?(%d*)$')
  amount, ends = whole(amount), whole(ends)
  if amount and ends then return amount, ends, whole(charged) end
end

-- What is used without the holds whose leases end by then, or without an amount of one of them; they
-- are lowered only if it is asked for.
local function used_without(key, used, by, removes, field, amount)
  local holds, total, next_end, kept = {}, nil, '', redis.call('HGETALL', key)
  for i = 1, #kept, 2 do
    local part, ends, place = held(string.sub(kept[i], 1, 5) == 'held:' and kept[i + 1])
    if part then table.insert(holds, {part, ends, place, kept[i], kept[i + 1]}) end
    if kept[i] == 'charged' then total = whole(kept[i + 1]) end
  end
  table.sort(holds, function(one, other) return one[2] < other[2] end)
  for _, hold in ipairs(holds) do
    local part, ends, place, name = unpack(hold, 1, 4)
    local goes = name == field and amount or not field and ends <= by and part or 0
    local left = goes
    if place and goes > 0 then
      -- A count drains in the order of charges: what was charged later is left first, and moves up.
      left = math.max(0, math.min(goes, used - math.min(micros(), ends * 1000000) - total + place))
      total = total - left
      for _, later in ipairs(holds) do
        if later == hold or later[3] > place then later[3] = later[3] - left end
      end
    end
    used, hold[1] = math.max(0, used - left), part - goes
    if goes < part then next_end = digits(math.min(ends, whole(next_end) or ends)) end
  end
  if not removes then return used end
  for _, hold in ipairs(holds) do
    local part, ends, place, name, text = unpack(hold, 1, 5)
    local new = digits(part) .. ' ' .. digits(ends) .. (place and ' ' .. digits(place) or '')
    if part == 0 then redis.call('HDEL', key, name) elseif new ~= text then redis.call('HSET', key, name, new) end
  end
  if total then redis.call('HSET', key, 'charged', digits(total)) end
  redis.call('HSET', key, 'used', digits(used), 'next_end', next_end)
  return used
end

-- What rolled over to the counts that were read, and until when they are kept, by key.
local rolled_over, kept_until = {}, {}

-- When a count that is written now is over.
local function expiry(key, ends, idle)
  return digits(ends < 0 and now + idle or math.max(ends, now, kept_until[key] or 0) + GRACE)
end

-- The last arguments are further fields, and values.
local function put(key, used, ends, idle, drains, ...)
  if drains then
    idle = math.ceil(used / 1000000) + GRACE
    local kept = redis.call('HMGET', key, 'used', 'charged')
    local before = math.max(0, (whole(kept[1]) or 0) - micros())
    local charged = (whole(kept[2]) or 0) + math.max(0, used - before)
    redis.call('HSET', key, 'at', digits(micros()), 'charged', digits(charged))
    used = used + micros()
  end
  redis.call('HSET', key, 'used', digits(used), 'ends', digits(ends), ...)
  redis.call('EXPIREAT', key, expiry(key, ends, idle))
end

local function grants_of(key)
  local packed = redis.call('GET', key)
  return packed and cmsgpack.unpack(packed) or {}
end

local function keep_grants(key, grants)
  local last = 0
  for _, grant in ipairs(grants) do last = math.max(last, grant[3]) end
  redis.call('SET', key, cmsgpack.pack(grants))
  redis.call('EXPIREAT', key, digits(last + CORRECTED))
end

-- What is granted, and the part by which no call has been checked before.
local function granted(grants)
  local sum, news = 0, 0
  for _, grant in ipairs(grants) do
    local _, amount, ends, new = unpack(grant)
    if ends > now then
      sum = sum + amount
      if new then news = news + amount end
    end
  end
  return sum, news
end
