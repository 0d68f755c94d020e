//! Reads dynamic sets, whose elements come from rules, and the counters of rules.

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use crate::element::{Element, Key};
use crate::message::{Attributes, BODY, Channel, NLMSG_ERROR, Verb, attributes, errno_of, kind_of, member};

/// Maximum elements of all sets together.
const ELEMENTS_MAX: usize = 1 << 20;
/// `NFT_SET_EVAL`.
const DYNAMIC: u32 = 0x20;

/// The elements of the table's dynamic sets with their remaining time, by the name of the set.
///
/// # Errors
/// `NotFound` if the table does not exist. Other errors if the socket fails.
pub fn dynamic_elements(channel: &mut Channel, table: &str) -> io::Result<HashMap<String, Vec<Element>>> {
    let named = Attributes::default().text(1, table);
    let (mut sets, mut failure) = (Vec::new(), None);
    channel.dump(Verb::GetSet, &named, |message| {
        failure = failure.take().or_else(|| error_of(message));
        sets.extend(dynamic_set(message));
    })?;
    if let Some(error) = failure {
        return Err(error);
    }
    let (mut all, mut count) = (HashMap::new(), 0);
    for set in sets {
        let mut elements = Vec::new();
        let named = named.clone().text(2, &set);
        channel.dump(Verb::GetElements, &named, |message| elements.extend(members(message)))?;
        count += elements.len();
        if count > ELEMENTS_MAX {
            break;
        }
        if !elements.is_empty() {
            all.insert(set, elements);
        }
    }
    Ok(all)
}

/// The sum of the packet counters in the rules of a table. `None` if the table has no counter.
///
/// # Errors
/// When the socket fails.
pub fn counted_packets(channel: &mut Channel, table: &str) -> io::Result<Option<u64>> {
    let mut sum = None;
    channel.dump(Verb::GetRule, &Attributes::default().text(1, table), |message| {
        for packets in counters(message, table) {
            sum = Some(sum.unwrap_or(0_u64).saturating_add(packets));
        }
    })?;
    Ok(sum)
}

/// The packets of each counter in a rule of the table.
fn counters(message: &[u8], table: &str) -> impl Iterator<Item = u64> {
    let rule = body(message, Verb::NewRule).filter(|rule| text(rule, 1) == Some(table));
    let expressions = rule.and_then(|rule| member(rule, 4)).unwrap_or_default();
    attributes(expressions).filter_map(|(_, expression)| {
        let data = member(expression, 2).filter(|_| text(expression, 1) == Some("counter"))?;
        Some(u64::from_be_bytes(member(data, 2)?.try_into().ok()?))
    })
}

fn error_of(message: &[u8]) -> Option<io::Error> {
    let errno = errno_of(message);
    (kind_of(message) == NLMSG_ERROR && errno > 0).then(|| io::Error::from_raw_os_error(errno))
}

fn body(message: &[u8], verb: Verb) -> Option<&[u8]> {
    message
        .get(BODY..)
        .filter(|_| kind_of(message).to_le_bytes()[0] == verb as u8 && kind_of(message) != NLMSG_ERROR)
}

fn dynamic_set(message: &[u8]) -> Option<String> {
    let body = body(message, Verb::NewSet)?;
    let flags = u32::from_be_bytes(member(body, 3)?.try_into().ok()?);
    let name = std::str::from_utf8(member(body, 2)?).ok()?;
    (flags & DYNAMIC != 0).then(|| name.trim_end_matches('\0').to_owned())
}

fn members(message: &[u8]) -> Vec<Element> {
    let list = body(message, Verb::NewElements).and_then(|body| member(body, 3)).unwrap_or_default();
    let element = |element: &[u8]| {
        let key = member(member(element, 1)?, 1)?;
        let remaining =
            member(element, 5).and_then(|remaining| remaining.try_into().ok()).map(u64::from_be_bytes)?;
        let expires = Some(Duration::from_millis(remaining)).filter(|remaining| !remaining.is_zero())?;
        Some(Element { key: Key::of_bytes(key), value: None, expires: Some(expires) })
    };
    attributes(list).filter_map(|(_, bytes)| element(bytes)).collect()
}

fn text(of: &[u8], kind: u16) -> Option<&str> {
    std::str::from_utf8(member(of, kind)?).ok().map(|text| text.trim_end_matches('\0'))
}
