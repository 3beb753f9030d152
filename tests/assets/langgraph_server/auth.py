"""Who may ask: whoever gives a name."""

from langgraph_sdk import Auth

auth = Auth()


@auth.authenticate
async def authenticate(authorization: str | None) -> Auth.types.MinimalUserDict:
    """The user is who the header says."""
    if not authorization:
        raise Auth.exceptions.HTTPException(status_code=401, detail="Who is asking?")
    return {"identity": authorization.removeprefix("Bearer ")}
