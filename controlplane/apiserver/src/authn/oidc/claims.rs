//! Maps the claims of a verified token to a user. No I/O.

use serde_json::Value;

use super::{
    User,
    config::{IssuerConfig, Mapping},
    expression::Expression,
};

/// Reason why the claims of a token do not yield a user.
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
    #[error("{0}")]
    Expression(String),
    #[error("a rule is not satisfied: {0}")]
    Rule(String),
    #[error("the expression {0:?} must evaluate to a non-empty string")]
    NoText(String),
}

/// The user of a token, according to the mappings of the configuration.
pub(super) fn user(config: &IssuerConfig, claims: &Value) -> Result<User, ClaimError> {
    for (claim, value) in &config.required_claims {
        if claims[claim] != value.as_str() {
            return Err(ClaimError::Required(claim.clone()));
        }
    }
    for rule in &config.claim_rules {
        let holds = rule.expression.over_claims(claims).map_err(ClaimError::Expression)?;
        if holds != true {
            return Err(ClaimError::Rule(rule.message.clone()));
        }
    }
    let name = match &config.username {
        Mapping::Claim(username) => {
            let name = text(claims, &username.claim)?;
            // An address that the issuer did not verify may belong to another user.
            if username.claim == "email"
                && !matches!(claims.get("email_verified"), None | Some(Value::Bool(true)))
            {
                return Err(ClaimError::UnverifiedEmail);
            }
            format!("{}{name}", username.prefix)
        }
        Mapping::Expression(expression) => string(expression, claims)?,
    };
    let groups = match &config.groups {
        Some(Mapping::Claim(groups)) => {
            list(claims, &groups.claim)?.iter().map(|one| format!("{}{one}", groups.prefix)).collect()
        }
        Some(Mapping::Expression(expression)) => strings(expression, claims)?,
        None => Vec::new(),
    };
    let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
    let mut user = User::new(&name, &groups);
    user.uid = match &config.uid {
        Some(Mapping::Claim(uid)) => text(claims, &uid.claim)?.to_owned(),
        Some(Mapping::Expression(expression)) => string(expression, claims)?,
        None => String::new(),
    };
    for (key, expression) in &config.extra {
        let values = strings(expression, claims)?;
        if !values.is_empty() {
            user.extra.insert(key.clone(), values);
        }
    }
    if let Some(id) = claims["jti"].as_str().filter(|id| !id.is_empty()) {
        user.extra.insert(super::super::CREDENTIAL.to_owned(), vec![format!("JTI={id}")]);
    }
    for rule in &config.user_rules {
        if !rule.expression.is_true_of(&user).map_err(ClaimError::Expression)? {
            return Err(ClaimError::Rule(rule.message.clone()));
        }
    }
    Ok(user)
}

/// The result of an expression that must be a non-empty string.
fn string(expression: &Expression, claims: &Value) -> Result<String, ClaimError> {
    match expression.over_claims(claims).map_err(ClaimError::Expression)? {
        Value::String(text) if !text.is_empty() => Ok(text),
        _ => Err(ClaimError::NoText(expression.source.clone())),
    }
}

/// The result of an expression: a string, a list of strings, or null. Empty strings are omitted, as upstream.
fn strings(expression: &Expression, claims: &Value) -> Result<Vec<String>, ClaimError> {
    let wrong = || ClaimError::NoText(expression.source.clone());
    let texts = match expression.over_claims(claims).map_err(ClaimError::Expression)? {
        Value::Null => Vec::new(),
        Value::String(text) => vec![text],
        Value::Array(list) => {
            let texts = list.iter().map(|one| one.as_str().map(str::to_owned).ok_or_else(wrong));
            texts.collect::<Result<_, _>>()?
        }
        _ => return Err(wrong()),
    };
    Ok(texts.into_iter().filter(|text| !text.is_empty()).collect())
}

fn text<'a>(claims: &'a Value, claim: &str) -> Result<&'a str, ClaimError> {
    match &claims[claim] {
        Value::Null => Err(ClaimError::Missing(claim.to_owned())),
        Value::String(text) if text.is_empty() => Err(ClaimError::Missing(claim.to_owned())),
        Value::String(text) => Ok(text),
        _ => Err(ClaimError::NotText(claim.to_owned())),
    }
}

/// The groups in a claim: absent, one text, or a list of texts.
fn list<'a>(claims: &'a Value, claim: &str) -> Result<Vec<&'a str>, ClaimError> {
    let wrong = || ClaimError::NotGroups(claim.to_owned());
    match &claims[claim] {
        Value::Null => Ok(Vec::new()),
        Value::String(one) => Ok(vec![one]),
        Value::Array(all) => all.iter().map(|one| one.as_str().ok_or_else(wrong)).collect(),
        _ => Err(wrong()),
    }
}
