//! The addresses and the hardware address that a pod asks for, by annotations: the CRI has no fields for them. They are
//! the capabilities `ips` and `mac` of the CNI conventions.

use std::collections::HashMap;
use std::net::IpAddr;

use serde_json::{Value, json};

use crate::error::Error;

/// One address, or several with commas between them; each may have the prefix of its network.
const IPS: &str = "cni.coracle/ips";
/// Six bytes, `0a:58:0a:2a:00:07`.
const MAC: &str = "cni.coracle/mac";

/// What the annotations ask for, by the name of its capability.
pub(super) fn capabilities(
    annotations: &HashMap<String, String>,
) -> Result<impl Iterator<Item = (String, Value)> + use<>, Error> {
    let ips = annotations.get(IPS).map(|text| ips(text)).transpose()?;
    let mac = annotations.get(MAC).map(|text| mac(text)).transpose()?;
    let ips = ips.map(|ips| ("ips".to_owned(), json!(ips)));
    Ok(ips.into_iter().chain(mac.map(|mac| ("mac".to_owned(), json!(mac)))))
}

/// Refuses to ask for addresses where there is no network of the pod's own.
pub(crate) fn refuse(annotations: &HashMap<String, String>) -> Result<(), Error> {
    match [IPS, MAC].into_iter().find(|name| annotations.contains_key(*name)) {
        Some(name) => Err(wrong(name, "a pod in the node's network has no addresses of its own")),
        None => Ok(()),
    }
}

fn ips(text: &str) -> Result<Vec<String>, Error> {
    let mut ips: Vec<(IpAddr, String)> = Vec::new();
    for one in text.split(',').map(str::trim) {
        let (host, prefix) = one.split_once('/').map_or((one, None), |(host, prefix)| (host, Some(prefix)));
        let ip: IpAddr = host.parse().map_err(|_not| wrong(IPS, format!("{one:?} is no address")))?;
        let width = if ip.is_ipv4() { 32 } else { 128 };
        if prefix.is_some_and(|prefix| prefix.parse::<u8>().map_or(true, |prefix| prefix > width)) {
            return Err(wrong(IPS, format!("{one:?} is no address with the prefix of its network")));
        }
        if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || is_broadcast(ip) {
            return Err(wrong(IPS, format!("{one} is no address of a host")));
        }
        if ips.iter().any(|(other, _)| *other == ip) {
            return Err(wrong(IPS, format!("{ip} is named twice")));
        }
        ips.push((ip, prefix.map_or_else(|| ip.to_string(), |prefix| format!("{ip}/{prefix}"))));
    }
    Ok(ips.into_iter().map(|(_, text)| text).collect())
}

fn is_broadcast(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V4(v4) if v4.is_broadcast())
}

/// As the kernel shows it.
fn mac(text: &str) -> Result<String, Error> {
    let is_byte = |part: &str| part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
    let byte = |part: &str| u8::from_str_radix(part, 16).ok().filter(|_| is_byte(part));
    let bytes: Option<Vec<u8>> = text.trim().split([':', '-']).map(byte).collect();
    let bytes = bytes.filter(|bytes| bytes.len() == 6);
    let bytes = bytes.ok_or_else(|| wrong(MAC, format!("{text:?} is no hardware address")))?;
    if bytes[0] & 1 == 1 {
        return Err(wrong(MAC, format!("{text} is the address of a group, not of one interface")));
    }
    if bytes.iter().all(|byte| *byte == 0) {
        return Err(wrong(MAC, format!("{text} is no interface's address")));
    }
    let parts: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(parts.join(":"))
}

fn wrong(name: &str, why: impl std::fmt::Display) -> Error {
    Error::invalid("annotations", format!("{name}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(name: &str, text: &str) -> Result<Value, String> {
        let told = capabilities(&HashMap::from([(name.to_owned(), text.to_owned())]));
        told.map(|mut told| told.next().unwrap().1).map_err(|error| error.to_string())
    }

    #[test]
    fn addresses_are_told_as_the_conventions_have_them() {
        for (text, told) in [
            ("10.42.0.7", json!(["10.42.0.7"])),
            (" 10.42.0.7/24, fd42::7/64", json!(["10.42.0.7/24", "fd42::7/64"])),
            ("FD42:0::7", json!(["fd42::7"])),
        ] {
            assert_eq!(asked(IPS, text), Ok(told), "{text}");
        }
        assert_eq!(asked(MAC, "0A-58-0a-2a-00-07"), Ok(json!("0a:58:0a:2a:00:07")));
        assert_eq!(capabilities(&HashMap::new()).unwrap().count(), 0);
    }

    #[test]
    fn every_wrong_value_is_named_with_its_annotation() {
        for (name, text, said) in [
            (IPS, "", "\"\" is no address"),
            (IPS, "10.42.0.7,", "\"\" is no address"),
            (IPS, "10.42.0", "\"10.42.0\" is no address"),
            (IPS, "[\"10.42.0.7\"]", "is no address"),
            (IPS, "10.42.0.7/33", "prefix"),
            (IPS, "fd42::7/129", "prefix"),
            (IPS, "10.42.0.7/", "prefix"),
            (IPS, "0.0.0.0", "no address of a host"),
            (IPS, "255.255.255.255", "no address of a host"),
            (IPS, "224.0.0.1", "no address of a host"),
            (IPS, "ff02::1", "no address of a host"),
            (IPS, "::1", "no address of a host"),
            (IPS, "fd42::7,fd42:0::7/64", "named twice"),
            (MAC, "", "no hardware address"),
            (MAC, "0a:58:0a:2a:00", "no hardware address"),
            (MAC, "0a:58:0a:2a:00:07:08", "no hardware address"),
            (MAC, "0a:58:0a:2a:0:7", "no hardware address"),
            (MAC, "0a580a2a0007", "no hardware address"),
            (MAC, "0a:58:0a:2a:00:+7", "no hardware address"),
            (MAC, "01:58:0a:2a:00:07", "a group"),
            (MAC, "ff:ff:ff:ff:ff:ff", "a group"),
            (MAC, "00:00:00:00:00:00", "no interface's"),
        ] {
            let error = asked(name, text).unwrap_err();
            assert!(error.starts_with(&format!("annotations: {name}: ")) && error.contains(said), "{error}");
        }
    }
}
