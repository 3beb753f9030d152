-- Everything but acquiring: op says what, for counts.
--   peek    answer of each: what is added to limits, used, limit, end of window, what of it rolled
--           over; used is -2 where something else than a count is kept
--   reset
--   grant   name, amount, ends, details; answer: what is kept, nothing if it would be over. One of 0
--           is a freeze, and takes the place of an earlier one
--   delay   amount: in how many microseconds a count drains, unless it drains later
--   revoke  name; answer: what is ended, nothing if there is none
--   grants  what is granted
--           answer of each grant: number of the count, amount, end, details, whether it is new

local answer, operations = {}, {}

-- Nothing is written: a server that is full, and takes no writes, shows its counts.
local function use(key, grants, drains)
  local more = granted(grants_of(grants))
  local kept = redis.pcall('HMGET', key, 'used', 'limit', 'ends', 'next_end', 'at', 'rolled_over')
  if kept.err and not string.find(kept.err, 'WRONGTYPE', 1, true) then error(kept.err) end
  local used, limit, ends, next_end = whole(kept[1]), whole(kept[2]), whole(kept[3]), whole(kept[4])
  if not (kept[1] or kept[2] or kept[3]) and redis.call('EXISTS', key) == 0 then
    return more, more > 0 and 0 or -1, -1, -1, -1
  end
  if not used or used < 0 or (kept[2] and not limit) or (kept[3] and not ends) then
    return 0, -2, -1, -1, -1
  end
  if next_end and next_end <= now then used = used_without(key, used, now) end
  if drains then used = math.max(0, used - math.max(micros(), whole(kept[5]) or 0)) end
  local rolled = held(kept[6])
  return more + (rolled or 0), used, limit or -1, ends or -1, rolled or -1
end

function operations.peek(_, key, grants, _, _, drains)
  for _, number in ipairs({use(key, grants, drains)}) do table.insert(answer, number) end
end

function operations.reset(_, key, _, ends, idle, drains)
  if redis.call('HGET', key, 'next_end') then used_without(key, 0, math.huge, true) end
  rolled_over[key], kept_until[key] = held(redis.call('HGET', key, 'rolled_over'))
  put(key, 0, ends, idle, drains)
end

function operations.delay(_, key, _, ends, idle, drains)
  local kept = redis.call('HMGET', key, 'used', 'at')
  local level = (whole(kept[1]) or 0) - math.max(micros(), whole(kept[2]) or 0)
  put(key, math.max(level, ask.amount), ends, idle, drains)
  -- What was held before gives back nothing of the delay.
  redis.call('HINCRBY', key, 'charged', digits(ask.amount))
end

local function tell(number, grant, is_new)
  local _, amount, ends, _, details = unpack(grant)
  for _, part in ipairs({number, amount, ends, details, is_new}) do table.insert(answer, part) end
end

function operations.grant(number, key, of_grants, ends, idle)
  local grants = {}
  for _, kept in ipairs(grants_of(of_grants)) do
    if kept[3] + CORRECTED > now then
      if kept[1] ~= ask.name then
        table.insert(grants, kept)
      elseif ask.amount > 0 then
        return tell(number, kept, 0)
      end
    end
  end
  if ask.ends <= now then return end
  local new = {ask.name, ask.amount, ask.ends, true, ask.details}
  table.insert(grants, new)
  keep_grants(of_grants, grants)
  -- The idle time of the count is reset, as after a charge.
  if ends < 0 then redis.call('EXPIREAT', key, expiry(key, ends, idle)) end
  tell(number, new, 1)
end

function operations.revoke(number, _, of_grants)
  local grants = grants_of(of_grants)
  for _, kept in ipairs(grants) do
    if kept[1] == ask.name and kept[3] > now then
      kept[3] = now
      keep_grants(of_grants, grants)
      tell(number, kept, 0)
    end
  end
end

function operations.grants(number, _, of_grants)
  for _, kept in ipairs(grants_of(of_grants)) do
    if kept[3] > now then tell(number, kept, 0) end
  end
end

for number, count in ipairs(ask.counts) do
  local key, of_grants, ends, idle, drains = unpack(count)
  operations[ask.op](number, KEYS[key], KEYS[of_grants], ends, idle, drains)
end
return answer
