-- Everything but acquiring: op says what. count is {key, key of its grants, end of window, idle time}.
--   peek    keys from the first on: a count, its grants, the next count ...
--           answer of each: used, limit, end of window, what is granted; used is -2 where something
--           else than a count is kept
--   reset   counts
--   grant   count, name, amount, ends, details; answer: what is kept, nothing if it would be over
--   revoke  count, name; answer: what is ended, nothing if there is none
--   grants  keys of grants
--           answer of each grant: index of the key, amount, end, details, whether it is new

local answer, operations = {}, {}

-- Nothing is written: a server that is full, and takes no writes, shows its counts.
local function use(key, grants)
  local more = granted(grants_of(grants))
  local kept = redis.pcall('HMGET', key, 'used', 'limit', 'ends', 'next_end')
  if kept.err and not string.find(kept.err, 'WRONGTYPE', 1, true) then error(kept.err) end
  local used, limit, ends, next_end = whole(kept[1]), whole(kept[2]), whole(kept[3]), whole(kept[4])
  if not (kept[1] or kept[2] or kept[3]) and redis.call('EXISTS', key) == 0 then
    return more > 0 and 0 or -1, -1, -1, more
  end
  if not used or used < 0 or (kept[2] and not limit) or (kept[3] and not ends) then
    return -2, -1, -1, 0
  end
  if next_end and next_end <= now then used = used_without(key, used, now) end
  return used, limit or -1, ends or -1, more
end

function operations.peek()
  for i = 1, #KEYS, 2 do
    for _, number in ipairs({use(KEYS[i], KEYS[i + 1])}) do table.insert(answer, number) end
  end
end

function operations.reset()
  for _, count in ipairs(ask.counts) do
    local index, _, ends, idle = unpack(count)
    local key = KEYS[index]
    if redis.call('HGET', key, 'next_end') then used_without(key, 0, math.huge, true) end
    put(key, 0, ends, idle)
  end
end

local function tell(index, grant, is_new)
  local _, amount, ends, _, details = unpack(grant)
  for _, part in ipairs({index, amount, ends, details, is_new}) do table.insert(answer, part) end
end

function operations.grant()
  local index, of_grants, ends, idle = unpack(ask.count)
  local key, grants = KEYS[of_grants], {}
  for _, kept in ipairs(grants_of(key)) do
    if kept[3] + COMPENSATED > now then
      if kept[1] == ask.name then return tell(1, kept, 0) end
      table.insert(grants, kept)
    end
  end
  if ask.ends <= now then return end
  local new = {ask.name, ask.amount, ask.ends, true, ask.details}
  table.insert(grants, new)
  keep_grants(key, grants)
  -- The idle time of the count begins anew, as after a charge.
  redis.call('EXPIREAT', KEYS[index], expiry(ends, idle))
  tell(1, new, 1)
end

function operations.revoke()
  local key = KEYS[ask.count[2]]
  local grants = grants_of(key)
  for _, kept in ipairs(grants) do
    if kept[1] == ask.name and kept[3] > now then
      kept[3] = now
      keep_grants(key, grants)
      tell(1, kept, 0)
    end
  end
end

function operations.grants()
  for index, key in ipairs(KEYS) do
    for _, kept in ipairs(grants_of(key)) do
      if kept[3] > now then tell(index, kept, 0) end
    end
  end
end

operations[ask.op]()
return answer
