-- The continuation of acquire.lua: the choice of the operation, and grants.

if ARGV[1] == 'acquire' then return acquire() end

-- The values of fields; nothing if something else than a hash is kept.
local function fields_of(...)
  local kept = redis.pcall('HMGET', ...)
  if not kept.err then return kept end
  if not string.find(kept.err, 'WRONGTYPE', 1, true) then error(kept.err) end
end

-- Used, limit, end of window, what is granted; used is -2 where something else is kept. Nothing is
-- written: a server that is full, and takes no writes, shows its counts.
local function peek(key)
  local kept = fields_of(key, 'used', 'limit', 'ends', 'next_end', 'granted', 'forgotten')
  if not kept then return -2, -1, -1, 0 end
  local grants, over = kept[5], whole(kept[6])
  local is_list, more = true, 0
  if grants then is_list, more = pcall(granted, key, grants) end
  if grants and over and over <= now then kept = {} end
  local used, limit, ends, next_end = whole(kept[1]), whole(kept[2]), whole(kept[3]), whole(kept[4])
  if not (kept[1] or kept[2] or kept[3]) then
    if grants and is_list then return more > 0 and 0 or -1, -1, -1, more end
    if redis.call('EXISTS', key) == 0 then return -1, -1, -1, 0 end
  end
  local odd = not used or used < 0 or (kept[2] and not limit) or (kept[3] and not ends)
  if odd or not is_list then return -2, -1, -1, 0 end
  if next_end and next_end <= now then used = used_without(key, used, now) end
  return used, limit or -1, ends or -1, more
end

local function grants_of(key)
  local packed = (fields_of(key, 'granted') or {})[1]
  return packed and cmsgpack.unpack(packed) or {}
end

-- Whether it is new, amount, end, details of what is kept; nothing if it would be over.
local function grant()
  local index, window_end, idle, _, name, amount, ends, details = unpack(ask.grant)
  local key, grants = KEYS[index], {}
  for _, kept in ipairs(grants_of(key)) do
    if kept[3] + COMPENSATED > now then
      if kept[1] == name then return {0, kept[2], kept[3], kept[5]} end
      table.insert(grants, kept)
    end
  end
  if ends <= now then return {} end
  table.insert(grants, {name, amount, ends, true, details})
  local used, packed = get(key), cmsgpack.pack(grants)
  if not used then
    keep_grants(key, packed)
  else
    redis.call('HSET', key, 'granted', packed)
    granted(key, packed)
    put(key, used, window_end, idle)  -- the idle time begins anew, as after a charge
  end
  return {1, amount, ends, details}
end

-- Amount, end, details of what is ended; nothing if there is none.
local function revoke()
  local index, name = unpack(ask.grant)
  local grants = grants_of(KEYS[index])
  for _, kept in ipairs(grants) do
    if kept[1] == name and kept[3] > now then
      kept[3] = now
      redis.call('HSET', KEYS[index], 'granted', cmsgpack.pack(grants))
      return {kept[2], now, kept[5]}
    end
  end
  return {}
end

-- Of each key what is kept; or index of the key, amount, end, details of each grant.
local answer = {}
for index, key in ipairs(KEYS) do
  if ARGV[1] == 'peek' then
    for _, number in ipairs({peek(key)}) do table.insert(answer, number) end
  elseif ARGV[1] == 'grants' then
    for _, kept in ipairs(grants_of(key)) do
      if kept[3] > now then
        for _, part in ipairs({index, kept[2], kept[3], kept[5]}) do table.insert(answer, part) end
      end
    end
  end
end
if ARGV[1] == 'grant' then return grant() end
if ARGV[1] == 'revoke' then return revoke() end
for _, count in ipairs(ask.counts or {}) do
  local index, ends, idle = unpack(count)
  local key = KEYS[index]
  if redis.call('HGET', key, 'next_end') then used_without(key, 0, math.huge, true) end
  local grants = redis.call('HGET', key, 'granted')
  if grants then granted(key, grants) end
  put(key, 0, ends, idle)
end
return answer
