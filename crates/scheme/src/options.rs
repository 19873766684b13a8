//! NodeSettings and terms that belong to one scheme. All other code passes them on.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::Error;

/// NodeSettings of a scheme, by name. The scheme lists the names in
/// [`SchemeInfo::options`](crate::SchemeInfo::options), and reads the values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchemeOptions(BTreeMap<&'static str, Value>);

impl SchemeOptions {
    /// Sets an option.
    pub fn set(&mut self, name: &'static str, value: impl Serialize) {
        let value = serde_json::to_value(value).expect("an option is a JSON value");
        self.0.insert(name, value);
    }

    /// The options that are set.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Value)> {
        self.0.iter().map(|(name, value)| (*name, value))
    }

    /// The options in the scheme's own form.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, Error> {
        let map = self.iter().map(|(name, value)| (name.to_owned(), value.clone())).collect();
        from_map(map).map_err(|why| Error::Setting {
            setting: "scheme",
            value: self.iter().map(|(name, value)| format!("{name}={value} ")).collect(),
            why,
        })
    }
}

/// Terms that a scheme tells its clients, as fields of a message.
pub type Terms = Map<String, Value>;

/// `own` as fields of a message.
pub fn terms(own: &impl Serialize) -> Terms {
    match serde_json::to_value(own) {
        Ok(Value::Object(map)) => map,
        _ => Terms::new(),
    }
}

/// The terms in the scheme's own form. Fields of other schemes are ignored.
pub fn parse_terms<T: DeserializeOwned>(terms: &Terms) -> Result<T, Error> {
    from_map(terms.clone())
        .map_err(|why| Error::Protocol { attempt: "reading the memory node's terms".into(), why })
}

fn from_map<T: DeserializeOwned>(map: Terms) -> Result<T, String> {
    serde_json::from_value(Value::Object(map)).map_err(|e| e.to_string())
}
