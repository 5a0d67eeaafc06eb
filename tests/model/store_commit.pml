/* SPDX-License-Identifier: Apache-2.0
 *
 * The commit protocol of bytecheckpoint/storage/object_store and the removal of checkpoint/store_removal.py, for spin: what can
 * happen between any two requests of several saves, a prune and a reader at one URL. A store carries out each request
 * at once or never, and lists what is there; it has no locks, no rename and no deletes with a condition. Replies can be
 * lost, requests that were given up can arrive later, and a process can die at any time.
 *
 * Left out: `StoreRemoval.end`, which removes what earlier prunes and dead saves have left, once it is old.
 *
 * test_store_model.py runs this file; docs/internals/architecture.md says what it shows.
 *
 *   SAVERS  saves, 1 to 3, begun in the order of their numbers
 *   RANKS   of each save, 1 or 2; each has one data object
 *   EMPTY   1: there is no checkpoint at first
 *   PRUNE   1: somebody removes what is at the URL
 *   READER  1: somebody loads meanwhile
 *   LATE    1: a copy of a commit that was given up can arrive after a prune has ended, or a delete of a prune after a
 *           whole save: no request takes so long, and the mutation shows what that is assumed for
 *   M_...   a mutation: the code as it must not be
 */
#ifndef SAVERS
#define SAVERS 2
#endif
#ifndef RANKS
#define RANKS 2
#endif
#ifndef EMPTY
#define EMPTY 0
#endif
#ifndef PRUNE
#define PRUNE 0
#endif
#ifndef READER
#define READER 0
#endif
#ifndef LATE
#define LATE 0
#endif

/* What `.metadata` can be: the mark of a save, by its number, of the one before all this, or one of these. No two are
 * equal, and none of them comes back, except that there can be none again. */
#define OLD SAVERS
#define NONE (SAVERS + 1)
#define REMOVED (SAVERS + 2)       /* the tombstone of the prune */
#define CLAIMED(s) (SAVERS + 3 + (s)) /* the tombstone that save s has put in the place of another */
#define IS_MARK(v) ((v) <= OLD)
#define IS_TOMBSTONE(v) ((v) >= REMOVED)

#define BIT(n) (1 << (n))
#define HAS(set, n) (((set) >> (n)) & 1)
#define FILES(s) (((1 << RANKS) - 1) << ((s) * RANKS))
#define IS_WHOLE(s) ((there & FILES(s)) == FILES(s))

/* Properties by number, so that a failure says which. */
#define MUST(property, x) assert((x) || (property) == 0)
#define WHOLE 1     /* what `.metadata` names is there */
#define ONE_RIGHT 2 /* who was told that the save failed has not committed, and never does */
#define NO_BLOCK 3  /* whoever is alone at the URL commits, unless replies are lost */
#define NEWEST 4    /* what was reported as committed stays until a later save or a prune replaces its mark */
#define READS 6     /* a reader gets all files of one checkpoint, or finds that another one is there, or none */

#if EMPTY
byte mark = NONE;
short there = 0;
#else
byte mark = OLD;
short there = FILES(OLD);
#endif
short older;           /* the objects that are older than the mark, by the store's clock */
byte base[SAVERS];     /* the version that a save has seen when it began: the condition of its commit */
byte replaced[SAVERS]; /* whose files it removes at once after its commit */
byte flight[SAVERS];   /* copies of its commit on their way */
byte reply[SAVERS];
byte born;             /* saves that have begun */
byte ended;            /* saves that ended or died */
byte reported;         /* saves that have returned */
byte sending;          /* saves that have sent their commit, and are not over */
byte failed;           /* saves that were told that they have failed */
byte late;             /* saves that have claimed the URL between the last look of the prune and its delete */
bool alone;            /* the youngest save began when all others were over, and nobody has begun since */
bool pruning;
bool deleting;         /* the prune has looked at its tombstone and is about to delete it */
#define LOST 0
#define DONE 1
#define REFUSED 2

/* It can commit no more: neither it nor a request of its own. What a file's age says, if it is above the grace. */
#define IS_OVER(s) (HAS(ended, s) && flight[s] == 0)
#define ALL_OVER (born == 0 || ((ended & (BIT(born) - 1)) == BIT(born) - 1 && NONE_FLIES))
#if SAVERS == 1
#define NONE_FLIES (flight[0] == 0)
#elif SAVERS == 2
#define NONE_FLIES (flight[0] + flight[1] == 0)
#else
#define NONE_FLIES (flight[0] + flight[1] + flight[2] == 0)
#endif

/* A save's process can die between any two requests. */
#define MAY_DIE(s) if :: skip :: goto dead fi

/* The objects that a save sweeps, and those that a prune removes, out of those that it has listed. */
#if defined(M_NO_GRACE)
#define SWEPT(f) HAS(going, f)
#else
#define SWEPT(f) (HAS(going, f) && ((f) / RANKS == replaced[s] || (IS_OLD((f) / RANKS) && (f) / RANKS != seen)))
#endif
#if defined(M_PRUNE_YOUNGER)
#define PRUNED(f) HAS(going, f)
#else
#define PRUNED(f) (HAS(going, f) && ((f) / RANKS == seen || IS_OLD((f) / RANKS)))
#endif
#define IS_OLD(v) ((v) == OLD || IS_OVER(v))
#define FIRST_OF(P) f = 0; do :: !P(f) -> f++ :: else -> break od
#if SAVERS * RANKS + RANKS == 2
#define ANY_OF(P) (P(0) || P(1))
#elif SAVERS * RANKS + RANKS == 3
#define ANY_OF(P) (P(0) || P(1) || P(2))
#elif SAVERS * RANKS + RANKS == 4
#define ANY_OF(P) (P(0) || P(1) || P(2) || P(3))
#elif SAVERS * RANKS + RANKS == 6
#define ANY_OF(P) (P(0) || P(1) || P(2) || P(3) || P(4) || P(5))
#endif

/* What nobody can read any more is set to 0, so that states which differ by that alone are one. */
inline forget(s) {
  if
  :: IS_OVER(s) -> base[s] = 0; replaced[s] = 0; reply[s] = LOST
  :: else
  fi
}

inline delete_object(which) {
  there = there & ~BIT(which);
  MUST(WHOLE, !IS_MARK(mark) || IS_WHOLE(mark))
}

/* --- The commits on their way ------------------------------------------------------------------------------------ */

inline arrive(s) {
  atomic {
    flight[s] > 0 -> flight[s]--;
#if defined(M_NO_CONDITION)
    if :: true
#else
    if
    :: mark != base[s] -> if :: reply[s] = REFUSED :: skip fi
    :: mark == base[s]
#endif
       -> mark = s;
          older = there;
          MUST(ONE_RIGHT, !HAS(failed, s));
          MUST(WHOLE, IS_WHOLE(s));
          if :: reply[s] = DONE :: skip fi
    fi;
    forget(s)
  }
}

proctype Network() {
end:
  do
  :: arrive(0)
#if SAVERS >= 2
  :: arrive(1)
#endif
#if SAVERS == 3
  :: arrive(2)
#endif
  od
}

/* --- A save: StoreCommit, and the uploads of its ranks ------------------------------------------------------------ */

proctype Save(byte s) {
  byte f = 0;
  byte sent = 0;
  byte seen = NONE;
  short going = 0;

  /* 1. Which version is there. */
  atomic {
    born == s;
    alone = ALL_OVER && !pruning;
    born++;
    base[s] = mark
  }
  MAY_DIE(s);
#if defined(M_TOMBSTONE_IS_NOTHING)
  if :: IS_TOMBSTONE(base[s]) -> base[s] = NONE :: else fi;
#elif PRUNE && !defined(M_NO_CLAIM) /* else there are no tombstones */
  if
  :: IS_TOMBSTONE(base[s]) ->
     atomic {
       if
       :: mark == base[s] -> mark = CLAIMED(s); base[s] = CLAIMED(s); if :: deleting -> late = late | BIT(s) :: else fi
       :: else -> goto fail
       fi
     };
     MAY_DIE(s)
  :: else
  fi;
#endif
  /* What is there now may be newer than the version above: then this save does not commit. */
  replaced[s] = (IS_MARK(mark) -> mark : s);

  /* 2. The data objects, one for each rank. Nobody reads them before the commit. */
  do
  :: f < RANKS ->
     MAY_DIE(s);
#if defined(M_COMMIT_BEFORE_DATA)
     if :: f == 1 && sent == 0 -> flight[s]++; sent++ :: else fi;
#endif
     there = there | BIT(s * RANKS + f);
     f++
  :: f < RANKS -> goto fail /* a rank's upload has failed */
  :: else -> break
  od;

  /* 3. All of them are there. */
  MAY_DIE(s);
#if !defined(M_NO_CHECK)
  if :: IS_WHOLE(s) :: else -> goto fail fi;
#endif

  /* 4. The commit. The client sends it again if no reply comes, and gives up at last. */
  do
  :: sent < 2 && reply[s] == LOST && (LATE || mark != CLAIMED(s) || !HAS(late, s) || !deleting) ->
     atomic { flight[s]++; sent++; sending = sending | BIT(s) };
     MAY_DIE(s)
  :: sent > 0 && reply[s] != LOST -> break
  :: sent > 0 && reply[s] == LOST -> break /* gives up */
  od;
  if
  :: reply[s] == DONE -> goto committed
  :: reply[s] != DONE
  fi;
  MAY_DIE(s);
#if defined(M_NO_LOOK)
  goto fail;
#endif
  if
  :: atomic { mark == s -> goto committed }
#if defined(M_NO_DOUBT)
  :: atomic { mark != s -> goto fail }
#else
  :: atomic { mark != s && reply[s] == REFUSED -> MUST(NO_BLOCK, !(alone && born == s + 1)); goto fail }
  :: mark != s && reply[s] != REFUSED -> goto dead /* in doubt: its files stay */
#endif
  :: goto dead                                     /* the store does not say */
  fi;

committed:
  /* 5. The sweep: files of the checkpoint that was replaced, and such as are older than any save may be. */
  atomic { f = 0; seen = mark; going = (IS_MARK(mark) -> there & older & ~FILES(s) : 0) };
  MAY_DIE(s);
  do
  :: atomic { ANY_OF(SWEPT) -> FIRST_OF(SWEPT); delete_object(f); going = going & ~BIT(f); f = 0 }
  :: !ANY_OF(SWEPT) -> break
  od;
  atomic {
    /* It was reported only if its mark had been there after the commit, as far as it saw. */
    if :: seen != NONE -> reported = reported | BIT(s) :: else fi;
    goto dead
  };

fail:
  atomic {
    MUST(ONE_RIGHT, mark != s);
    failed = failed | BIT(s);
    f = 0
  };
  do
  :: f < RANKS -> MAY_DIE(s); atomic { delete_object(s * RANKS + f); f++ }
  :: else -> break
  od;
dead:
  atomic { ended = ended | BIT(s); sending = sending & ~BIT(s); f = 0; sent = 0; seen = 0; going = 0; forget(s) }
}

#if PRUNE
/* --- A prune: storage/object_store/removal.py --------------------------------------------------------------------- */

proctype Prune() {
  byte f = 0;
  byte seen;
  short going;

  /* 1. What is there, and which version of the mark. */
  atomic { pruning = true; alone = false; going = there };
  seen = mark;
  /* 2. The tombstone, on the condition that the mark is still what was looked at. */
  atomic {
    if
    :: mark != seen -> goto over
    :: mark == seen -> mark = REMOVED
    fi
  };
  /* 3. What was listed. Without a mark only what is older than any save may be, and nothing if anything is younger. */
  do
  :: atomic { ANY_OF(PRUNED) -> FIRST_OF(PRUNED); delete_object(f); going = going & ~BIT(f); f = 0 }
  :: !ANY_OF(PRUNED) -> break
  :: goto over /* it dies */
  od;
  /* 4. The tombstone itself. A delete has no condition, so what it deletes may be another object than was looked at. */
  atomic {
    if
#if defined(M_ANY_TOMBSTONE)
    :: IS_TOMBSTONE(mark)
#else
    :: mark == REMOVED && (!IS_MARK(seen) || IS_OLD(seen))
#endif
       -> deleting = true
    :: else -> goto over
    fi
  };
  if :: skip :: goto over fi;
  atomic {
    (LATE || (NONE_FLIES && sending == 0)) ->
    MUST(NEWEST, !(IS_MARK(mark) && mark != OLD && HAS(reported, mark)));
    mark = NONE;
    deleting = false
  };
over:
  deleting = false;
  pruning = false
}

#endif
#if READER
/* --- A load ------------------------------------------------------------------------------------------------------- */

proctype Reader() {
  byte f = 0;
  byte seen;

again:
  seen = mark;
  if :: IS_MARK(seen) :: else -> goto over fi;
  f = 0;
  do
  :: f < RANKS ->
     if
     :: atomic { HAS(there, seen * RANKS + f) -> f++ }
     :: atomic { !HAS(there, seen * RANKS + f) -> MUST(READS, mark != seen) }; goto again
     fi
  :: else -> break
  od;
over:
  skip
}
#endif

init {
  atomic {
    run Network();
    run Save(0);
#if SAVERS >= 2
    run Save(1);
#endif
#if SAVERS == 3
    run Save(2);
#endif
#if PRUNE
    run Prune();
#endif
#if READER
    run Reader();
#endif
  }
}
