-- The continuation of acquire.lua: grants, and the choice of the operation.

-- The values of fields; nothing if something else than a hash is kept.
local function fields_of(...)
  local kept = redis.pcall('HMGET', ...)
  if not kept.err then return kept end
  if not string.find(kept.err, 'WRONGTYPE', 1, true) then error(kept.err) end
end

local function peek(key)
  local kept = fields_of(key, 'used', 'limit', 'ends', 'next_end', 'granted')
  if not kept then return -2, -1, -1, 0 end
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

local function write_grants(key, grants)
  local texts = {}
  for _, grant in ipairs(grants) do
    local name, amount, ends, new = unpack(grant)
    if ends + COMPENSATED <= now then
      redis.call('HDEL', key, 'grant:' .. name)
    else
      table.insert(texts, string.format('%s %.0f %.0f %s,', name, amount, ends, new))
    end
  end
  redis.call('HSET', key, 'granted', table.concat(texts))
end

local function grant()
  local count, name, amount, ends, details = unpack(ask.grant)
  local index, window_end, idle = unpack(count)
  local key = KEYS[index]
  local grants = grants_of(redis.call('HGET', key, 'granted'))
  for _, kept in ipairs(grants) do
    if kept[1] == name and kept[3] + COMPENSATED > now then
      return {0, kept[2], kept[3], redis.call('HGET', key, 'grant:' .. name)}
    end
  end
  if ends <= now then return {} end
  table.insert(grants, {name, amount, ends, '1'})
  local used = get(key)
  write_grants(key, grants)
  redis.call('HSET', key, 'grant:' .. name, details)
  granted(key, redis.call('HGET', key, 'granted'))
  -- The idle time of an existing count begins anew, as after a charge.
  if used then
    put(key, used, window_end, idle)
  else
    local _, expires = expiry(key, window_end, 0)
    redis.call('EXPIREAT', key, expires)
  end
  return {1, amount, ends, details}
end

local function revoke()
  local index, name = unpack(ask.grant)
  local key = KEYS[index]
  local grants = grants_of(redis.call('HGET', key, 'granted'))
  for _, kept in ipairs(grants) do
    if kept[1] == name and kept[3] > now then
      kept[3] = now
      write_grants(key, grants)
      return {kept[2], now, redis.call('HGET', key, 'grant:' .. name)}
    end
  end
  return {}
end

local function list_grants()
  local found = {}
  for index, key in ipairs(KEYS) do
    local text = (fields_of(key, 'granted') or {})[1]
    for _, kept in ipairs(grants_of(text)) do
      local name, amount, ends = unpack(kept)
      if ends > now then
        for _, part in ipairs({index, amount, ends, redis.call('HGET', key, 'grant:' .. name)}) do
          table.insert(found, part)
        end
      end
    end
  end
  return found
end

if ARGV[1] == 'grant' then return grant() end
if ARGV[1] == 'revoke' then return revoke() end
if ARGV[1] == 'grants' then return list_grants() end
local answer = {}
if ARGV[1] == 'reset' then
  for _, count in ipairs(ask.counts) do
    local index, ends, idle = unpack(count)
    if redis.call('HGET', KEYS[index], 'next_end') then give_back(KEYS[index], 0, math.huge) end
    local grants = redis.call('HGET', KEYS[index], 'granted')
    if grants then granted(KEYS[index], grants) end
    put(KEYS[index], 0, ends, idle)
  end
else
  for _, key in ipairs(KEYS) do
    for _, number in ipairs({peek(key)}) do table.insert(answer, number) end
  end
end
return answer
