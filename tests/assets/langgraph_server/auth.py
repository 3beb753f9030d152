"""Who may ask: whoever gives a name."""

from langgraph_sdk import Auth

auth = Auth()


@auth.authenticate
async def authenticate(authorization: str | None) -> Auth.types.MinimalUserDict:
    """The user is who the header says; the page's rules, which follow, do not trust guests."""
    if not authorization:
        raise Auth.exceptions.HTTPException(status_code=401, detail="Who is asking?")
    name = authorization.removeprefix("Bearer ")
    return {"identity": name, "permissions": [] if name.startswith("guest") else ["quota:trusted"]}
