-- The continuation of acquire.lua: grants, and the choice of the operation.

local function write_grants(key, grants)
  local texts = {}
  for _, grant in ipairs(grants) do
    local name, amount, ends, new = unpack(grant)
    if ends + ask.compensated <= now then
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
    if kept[1] == name then return {0, kept[2], kept[3], redis.call('HGET', key, 'grant:' .. name)} end
  end
  if ends <= now then return {} end
  table.insert(grants, {name, amount, ends, '1'})
  local used = get(key)
  redis.call('HSET', key, 'grant:' .. name, details)
  write_grants(key, grants)
  granted(key, redis.call('HGET', key, 'granted'))
  -- The idle time of an existing count begins anew, as after a charge.
  if used then put(key, used, window_end, idle) end
  if not used then
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
    local text = redis.pcall('HGET', key, 'granted')
    if type(text) == 'table' and not string.find(text.err, 'WRONGTYPE', 1, true) then
      error(text.err)
    end
    for _, kept in ipairs(grants_of(type(text) == 'string' and text)) do
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

if ask.op == 'acquire' then return acquire() end
if ask.op == 'grant' then return grant() end
if ask.op == 'revoke' then return revoke() end
if ask.op == 'grants' then return list_grants() end
local answer = {}
if ask.op == 'reset' then
  for _, counter in ipairs(ask.counters) do
    local index, ends, idle = unpack(counter[1])
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
