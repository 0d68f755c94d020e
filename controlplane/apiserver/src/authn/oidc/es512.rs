//! Tokens that are signed with ES512 (ECDSA with P-521), which the library for the other algorithms does not support.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use jsonwebtoken::{
    errors::{Error, ErrorKind},
    jwk::{AlgorithmParameters, EllipticCurve, Jwk},
};
use serde::Deserialize;
use serde_json::Value;

use super::config::IssuerConfig;

/// Bytes of one coordinate of a point.
const COORDINATE: usize = 66;

/// The header of a token.
#[derive(Deserialize)]
pub(super) struct Header {
    alg: String,
    /// Id of the key.
    #[serde(default)]
    pub(super) kid: Option<String>,
    /// Extensions that the recipient must understand.
    #[serde(default)]
    crit: Option<Value>,
}

/// The header of a token with this algorithm. `None` for other algorithms, and for tokens with critical extensions.
/// Tokens with critical extensions are then refused.
pub(super) fn header(token: &str) -> Option<Header> {
    let header = BASE64_URL_SAFE_NO_PAD.decode(token.split('.').next()?).ok()?;
    let header: Header = serde_json::from_slice(&header).ok()?;
    (header.alg == "ES512" && header.crit.is_none()).then_some(header)
}

/// The claims of a token. Checks its signature, issuer, audience and expiry; `now` is in seconds since 1970.
pub(super) fn claims(token: &str, key: &Jwk, config: &IssuerConfig, now: i64) -> Result<Value, Error> {
    let claims = verified(token, key).ok_or(ErrorKind::InvalidSignature)?;
    let expiry = claims["exp"].as_f64().ok_or_else(|| ErrorKind::MissingRequiredClaim("exp".to_owned()))?;
    #[expect(clippy::cast_precision_loss, reason = "seconds of today have 31 bits")]
    if expiry < now as f64 {
        return Err(ErrorKind::ExpiredSignature.into());
    }
    if claims["iss"] != config.url.as_str() {
        return Err(ErrorKind::InvalidIssuer.into());
    }
    let audiences = match &claims["aud"] {
        Value::Array(all) => all.as_slice(),
        one => std::slice::from_ref(one),
    };
    let is_for_us = |audience: &Value| config.audiences.iter().any(|own| audience == own.as_str());
    if !audiences.iter().any(is_for_us) {
        return Err(ErrorKind::InvalidAudience.into());
    }
    Ok(claims)
}

/// The claims of a token. `None` if the key has not signed the token.
fn verified(token: &str, key: &Jwk) -> Option<Value> {
    let AlgorithmParameters::EllipticCurve(point) = &key.algorithm else { return None };
    (point.curve == EllipticCurve::P521).then_some(())?;
    let decode = |text: &str| BASE64_URL_SAFE_NO_PAD.decode(text).ok();
    let (x, y) = (decode(&point.x)?, decode(&point.y)?);
    (x.len() == COORDINATE && y.len() == COORDINATE).then_some(())?;
    let (signed, signature) = token.rsplit_once('.')?;
    let (_header, payload) = signed.split_once('.')?;
    let public = [[4].as_slice(), &x, &y].concat();
    coracle_token_signer::verify_es512(&public, signed.as_bytes(), &decode(signature)?)?;
    serde_json::from_slice(&decode(payload)?).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::authn::oidc::config::AuthenticationConfig;

    /// A token and its key, made by openssl. The token expires in the year 2100.
    const TOKEN: &str = "eyJhbGciOiJFUzUxMiIsImtpZCI6ImEifQ.eyJpc3MiOiJodHRwczovL2EiLCJhdWQiOlsiYiJdLCJleHAiOjQxMDI0NDQ4MDAsInN1YiI6ImFubiJ9.AYKwxKpUH51LIb3adCP4FIGiK0SlgfazGcuM5_HQl1aLyqUlkxES5OH39BXkzGS84wUOi-WmzBFOPrK2vJMs5t7nAIHtnVp-DYtQpshEad_vFdJpL8EJRz4QK2qRF9B-J_462b7lEAXnEkENuj_382nKriymWq2unKIucDbLtjkFyfAE";
    const X: &str =
        "AMwDFNo_mdF-FsAnrMTNOLbX6BP2bjLCV6Aqp7mkFvuoSZ-CJlnqzm0JW2U0qV0O8JrG8lbdyTua5FdIDm15NdKx";
    const Y: &str =
        "AIDt6qYQAIdGshAzUNJshpX-5buEVP-Z-E3t51tSfkaWhUzGQgLgfrFoNj3uGz9KEymSB-bn5s4rLvF4H5s8QZaP";
    const NOW: i64 = 1_800_000_000;

    fn key(curve: &str) -> Jwk {
        serde_json::from_value(json!({"kty": "EC", "crv": curve, "kid": "a", "x": X, "y": Y})).unwrap()
    }

    fn config(url: &str, audience: &str) -> IssuerConfig {
        let text = format!(
            "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\njwt:\n- issuer: {{url: '{url}', \
             audiences: [{audience}]}}\n  claimMappings: {{username: {{claim: sub, prefix: ''}}}}"
        );
        AuthenticationConfig::parse(&text).unwrap().issuers.remove(0)
    }

    #[test]
    fn a_token_is_verified_and_for_this_issuer_and_audience_until_it_expires() {
        assert_eq!(header(TOKEN).unwrap().kid.as_deref(), Some("a"));
        let found = claims(TOKEN, &key("P-521"), &config("https://a", "b"), NOW).unwrap();
        assert_eq!(found["sub"], "ann");
        let reason = |token: &str, key: &Jwk, config: &IssuerConfig, now| {
            claims(token, key, config, now).unwrap_err().into_kind()
        };
        let ours = config("https://a", "b");
        assert_eq!(reason(TOKEN, &key("P-521"), &ours, 4_102_444_801), ErrorKind::ExpiredSignature);
        assert_eq!(reason(TOKEN, &key("P-521"), &config("https://c", "b"), NOW), ErrorKind::InvalidIssuer);
        assert_eq!(reason(TOKEN, &key("P-521"), &config("https://a", "c"), NOW), ErrorKind::InvalidAudience);
        assert_eq!(reason(TOKEN, &key("P-256"), &ours, NOW), ErrorKind::InvalidSignature);
        let (signed, signature) = TOKEN.rsplit_once('.').unwrap();
        let (head, _) = signed.split_once('.').unwrap();
        let other = BASE64_URL_SAFE_NO_PAD
            .encode(json!({"iss": "https://a", "aud": "b", "exp": 4_102_444_800_i64}).to_string());
        for forged in
            [format!("{head}.{other}.{signature}"), format!("{signed}."), signed.to_owned(), String::new()]
        {
            assert_eq!(reason(&forged, &key("P-521"), &ours, NOW), ErrorKind::InvalidSignature, "{forged}");
        }
    }

    #[test]
    fn tokens_of_other_algorithms_or_with_extensions_are_not_for_this_module() {
        for head in [
            json!({"alg": "ES256"}),
            json!({"alg": "none"}),
            json!({"alg": "ES512", "crit": ["x"]}),
            json!([]),
        ] {
            let token = format!("{}.e30.AA", BASE64_URL_SAFE_NO_PAD.encode(head.to_string()));
            assert!(header(&token).is_none(), "{head}");
        }
        assert!(header("").is_none());
    }
}
