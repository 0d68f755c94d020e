//! From the claims of a verified token to a user. Pure.

use serde_json::Value;

use super::{User, config::IssuerConfig};

/// Claims that make no user.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ClaimError {
    #[error("the claim {0:?} is missing or empty")]
    Missing(String),
    #[error("the claim {0:?} is not text")]
    NotText(String),
    #[error("the claim {0:?} is neither text nor a list of texts")]
    NotGroups(String),
    #[error("the email address is not verified")]
    UnverifiedEmail,
    #[error("the claim {0:?} does not have the required value")]
    Required(String),
}

/// The user of a token, named as the configuration says.
pub(super) fn user(config: &IssuerConfig, claims: &Value) -> Result<User, ClaimError> {
    for (claim, value) in &config.required_claims {
        if claims[claim] != value.as_str() {
            return Err(ClaimError::Required(claim.clone()));
        }
    }
    let name = text(claims, &config.username.claim)?;
    // An address that the issuer did not verify may belong to another user.
    if config.username.claim == "email"
        && !matches!(claims.get("email_verified"), None | Some(Value::Bool(true)))
    {
        return Err(ClaimError::UnverifiedEmail);
    }
    let groups = match &config.groups {
        Some(groups) => {
            list(claims, &groups.claim)?.iter().map(|one| format!("{}{one}", groups.prefix)).collect()
        }
        None => Vec::new(),
    };
    let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
    let mut user = User::new(&format!("{}{name}", config.username.prefix), &groups);
    if let Some(claim) = &config.uid {
        user.uid = text(claims, claim)?.to_owned();
    }
    if let Some(id) = claims["jti"].as_str().filter(|id| !id.is_empty()) {
        user.extra.insert(super::super::CREDENTIAL.to_owned(), vec![format!("JTI={id}")]);
    }
    Ok(user)
}

fn text<'a>(claims: &'a Value, claim: &str) -> Result<&'a str, ClaimError> {
    match &claims[claim] {
        Value::Null => Err(ClaimError::Missing(claim.to_owned())),
        Value::String(text) if text.is_empty() => Err(ClaimError::Missing(claim.to_owned())),
        Value::String(text) => Ok(text),
        _ => Err(ClaimError::NotText(claim.to_owned())),
    }
}

/// The groups of a claim, which may be absent, one text or a list of texts.
fn list<'a>(claims: &'a Value, claim: &str) -> Result<Vec<&'a str>, ClaimError> {
    let wrong = || ClaimError::NotGroups(claim.to_owned());
    match &claims[claim] {
        Value::Null => Ok(Vec::new()),
        Value::String(one) => Ok(vec![one]),
        Value::Array(all) => all.iter().map(|one| one.as_str().ok_or_else(wrong)).collect(),
        _ => Err(wrong()),
    }
}
