//! Types of values.

use std::fmt;

macro_rules! kinds {
    ($($name:ident $number:literal $text:literal $redis:literal,)*) => {
        /// The type of a value, with its encoding in the database.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Kind {
            $(#[doc = concat!("A ", $text, ".")] $name = $number,)*
        }

        impl Kind {
            /// Returns the type of a number in the database.
            pub const fn from_number(number: u8) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// The type with its encoding, for messages.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// The type as the command TYPE names it.
            pub const fn type_name(self) -> &'static str {
                match self {
                    $(Self::$name => $redis,)*
                }
            }
        }
    };
}

kinds! {
    String 0 "string" "string",
    List 1 "list" "list",
    Set 2 "set" "set",
    SortedSetText 3 "sorted set with scores as text" "zset",
    Hash 4 "hash" "hash",
    SortedSet 5 "sorted set" "zset",
    Module 7 "value of a module" "module",
    HashZipmap 9 "hash in a zipmap" "hash",
    ListZiplist 10 "list in a ziplist" "list",
    SetIntset 11 "set of integers" "set",
    SortedSetZiplist 12 "sorted set in a ziplist" "zset",
    HashZiplist 13 "hash in a ziplist" "hash",
    ListQuicklist 14 "list of ziplists" "list",
    Stream1 15 "stream of Redis 5" "stream",
    HashListpack 16 "hash in a listpack" "hash",
    SortedSetListpack 17 "sorted set in a listpack" "zset",
    ListQuicklist2 18 "list of listpacks" "list",
    Stream2 19 "stream of Redis 7.0" "stream",
    SetListpack 20 "set in a listpack" "set",
    Stream3 21 "stream of Redis 7.2" "stream",
    HashExpiring 24 "hash with expiries of its fields" "hash",
    HashListpackExpiring 25 "hash with expiries of its fields in a listpack" "hash",
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
